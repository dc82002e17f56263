"""The sweeper removes results that were kept for long enough."""

from __future__ import annotations

import pytest

from celery_sidejob.services.sweep import results
from celery_sidejob.services.sweep.results import ExpiredResults
from celery_sidejob.services.sweep.sweep import Sweep
from tests.tools.in_process import Stage

FILL = """INSERT INTO results SELECT 'task:' || n, 'SUCCESS', '', CASE WHEN n <= 2500 THEN now() END
    FROM generate_series(1, 2600) n"""
COUNT = "SELECT count(*) FROM results"


def test_expired_results_go_and_others_stay(stage: Stage) -> None:
    stage.sql(FILL)
    ExpiredResults(Sweep(stage.runtime)).run_once()
    assert stage.sql(COUNT) == [(100,)]


def test_a_worker_removes_them_in_pages(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "SLICE_S", 0.0)
    sweep = Sweep(stage.runtime)
    sweep.worker = stage  # type: ignore[assignment] # any: it is only asked whether there is one
    stage.sql(FILL)
    duty = ExpiredResults(sweep)
    left = []
    for _ in range(4):
        duty.run_once()
        left += stage.sql(COUNT)
    assert left == [(1600,), (600,), (100,), (100,)]


def test_expired_chords_go_too(stage: Stage) -> None:
    stage.sql("INSERT INTO chords (key, expires_at) VALUES ('old', now()), ('young', now() + interval '1 day')")
    ExpiredResults(Sweep(stage.runtime)).run_once()
    assert stage.sql("SELECT key FROM chords") == [("young",)]

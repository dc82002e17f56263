"""Chords on real workers of an app with SideJob: each body runs once, whatever dies when a part is counted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from celery import chain, chord, group, states
from celery.exceptions import ChordError

from celery_sidejob import embedded
from celery_sidejob.results import waiting
from celery_sidejob.store.schema.migrate import upgrade
from tests.results.conftest import Rows, Site
from tests.results.test_end_storms import TORN
from tests.tools.brokers import in_postgres
from tests.tools.recorder import Record
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import patient, wait_until
from tests.tools.workers import Processes

TIMEOUT_S = patient(45)


@pytest.mark.parametrize(
    ("part", "body", "point"),
    [
        ("plain.part", "plain.total", "chord-part"),
        ("durable.part", "durable.total", "durable-end"),
        ("durable.silent", "plain.total", "durable-end"),
        ("job.part", "job.total", "end"),
        ("durable.part", "plain.total", "chord-body"),
        ("plain.part", "durable.total", "chord-body"),
    ],
)
@pytest.mark.parametrize("when", ["before-commit", "after-commit"])
def test_a_kill_at_the_last_part(site: Site, tmp_path: Path, part: str, body: str, point: str, when: str) -> None:
    count = 1 if point == "chord-body" else 3
    once = tmp_path / "crashed"
    result = chord([site.sig(part, number) for number in range(3)])(site.sig(body))
    site.start(SIDEJOB_CRASH_POINTS=f"{point}:{when}=kill-child@{count}", SIDEJOB_CRASH_ONCE=str(once))
    assert result.get(timeout=TIMEOUT_S) == 3
    assert once.exists()
    assert site.bodies() == [[0, 1, 2]]


def test_chords_of_all_that_celery_composes(site: Site, rows: Rows) -> None:
    site.start(concurrency=2)
    plain, durable, job = (lambda n, kind=kind: site.sig(f"{kind}.part", n) for kind in ("plain", "durable", "job"))
    total = site.sig("durable.total")
    same = site.sig("plain.part")
    results = [
        (chord([plain(1), durable(2), job(3)])(site.sig("plain.total")), 6),
        (chord([plain(1), durable(2), job(3)])(total), 6),
        (chord([durable(1), job(2)])(site.sig("job.total")), 3),
        (chord([durable(4)])(total), 4),
        (chord([], app=site.app)(total), 0),
        (chord(durable(number) for number in range(5))(total), 10),
        (chord([chain(durable(1), same.clone()), chain(plain(2), same.clone())])(total), 3),
        (chord([chord([durable(1), durable(2)], site.sig("durable.total")), durable(3)])(total), 6),
        (chain(group([durable(1), durable(2)]), total.clone(), same.clone())(), 3),
        (chord([durable(1), durable(2)])(chain(total.clone(), same.clone())), 3),
    ]
    for index, (result, expected) in enumerate(results):
        assert (index, result.get(timeout=TIMEOUT_S)) == (index, expected)
    assert rows.all("SELECT key FROM chords") == []


def test_a_part_that_fails_fails_the_body_and_calls_its_errbacks(site: Site) -> None:
    site.start()
    body = site.sig("durable.total").on_error(site.sig("errback"))
    result = chord([site.sig("durable.part", 1), site.sig("fail", 2)])(body)
    with pytest.raises(ChordError, match="number 2"):
        site.app.AsyncResult(result.id).get(timeout=TIMEOUT_S)  # without its parents, whose error comes first
    site.record.wait_for("errback", timeout=TIMEOUT_S)
    assert site.bodies() == []


def test_a_body_on_another_broker(
    database_url: str, redis_url: str, record: Record, processes: Processes, tmp_path: Path
) -> None:
    """It is sent, and then its chord forgotten; after a death in between its result shows that it was sent."""
    site = Site(database_url, redis_url, record, processes)
    try:
        once = tmp_path / "crashed"
        site.start(SIDEJOB_CRASH_POINTS="durable-end:after-commit=kill-child@2", SIDEJOB_CRASH_ONCE=str(once))
        for body in ("plain.total", "durable.total"):
            result = chord([site.sig("durable.part", number) for number in range(2)])(site.sig(body))
            assert result.get(timeout=TIMEOUT_S) == 1
        assert (once.exists(), site.bodies()) == (True, [[0, 1]] * 2)
    finally:
        site.close()


@KOMBU_5_7
@pytest.mark.few(0)
@pytest.mark.parametrize("kind", ["plain", "durable", "job"])
def test_postgres_restarts_in_a_chord_of_a_thousand(
    own_postgres: embedded.Postgres, record: Record, processes: Processes, kind: str
) -> None:
    upgrade(own_postgres.url)
    site = Site(own_postgres.url, in_postgres(own_postgres.url), record, processes)
    try:
        site.start(concurrency=2, SETTINGS=json.dumps({"task_acks_late": True}))
        result = chord([site.sig(f"{kind}.part", number) for number in range(1000)])(site.sig("durable.total"))
        looking = Rows(own_postgres.url)
        wait_until(lambda: looking.all("SELECT 1 FROM chords WHERE counted > 300"), timeout=TIMEOUT_S)
        looking.close()
        own_postgres.restart()
        assert result.get(timeout=2 * TIMEOUT_S) == sum(range(1000))
        assert site.bodies() == [list(range(1000))]
    finally:
        site.close()


# -- a durable task's result and its end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crash", "state"),
    [
        ("before=kill-child", states.FAILURE),
        ("before-commit=kill-group", states.FAILURE),
        ("after-commit=kill-group", states.SUCCESS),
    ],
)
def test_a_result_is_there_if_its_task_has_ended(
    site: Site, rows: Rows, tmp_path: Path, crash: str, state: str
) -> None:
    once = tmp_path / "crashed"
    site.start(SIDEJOB_CRASH_POINTS=f"durable-end:{crash}", SIDEJOB_CRASH_ONCE=str(once))
    result = site.sig("durable.once", 1).delay()
    wait_until(once.exists, timeout=TIMEOUT_S)
    if crash.endswith("kill-group"):
        site.start()
    result.get(timeout=TIMEOUT_S, propagate=False)
    wait_until(lambda: not rows.all("SELECT 1 FROM messages"), timeout=TIMEOUT_S)
    assert (once.exists(), result.state) == (True, state)
    assert rows.all("SELECT reason FROM dead") == ([("lost",)] if state == states.FAILURE else [])


@pytest.mark.parametrize("when", ["before-commit", "after-commit"])
@pytest.mark.parametrize("how", ["limited", "revoked", "reject"])
def test_what_ends_otherwise_has_its_result_with_that_end(
    site: Site, rows: Rows, tmp_path: Path, how: str, when: str
) -> None:
    once = tmp_path / "crashed"
    site.start(SIDEJOB_CRASH_POINTS=f"durable-bury:{when}=kill-group", SIDEJOB_CRASH_ONCE=str(once))
    result = site.sig("durable.reject" if how == "reject" else "durable.limited").delay()
    if how == "revoked":
        site.record.wait_for("begun", timeout=TIMEOUT_S)
        result.revoke(terminate=True, signal="SIGKILL")
    wait_until(once.exists, timeout=TIMEOUT_S)
    assert rows.all(TORN, [result.id]) == []
    assert len(rows.all("SELECT 1 FROM dead")) == (when == "after-commit")


@pytest.mark.parametrize(
    ("task", "point", "state"),
    [("durable.once", "durable-end", states.SUCCESS), ("fail", "durable-bury", states.FAILURE)],
)
def test_nobody_sees_a_result_before_its_task_has_ended(
    site: Site, tmp_path: Path, task: str, point: str, state: str
) -> None:
    once = tmp_path / "stopped"
    worker = site.start("solo", SIDEJOB_CRASH_POINTS=f"{point}:before-commit=stop", SIDEJOB_CRASH_ONCE=str(once))
    result = site.sig(task, 1).delay()
    wait_until(once.exists, timeout=TIMEOUT_S)
    assert result.state == states.PENDING
    wait_until(lambda: stat_of(worker.pid) == "T", timeout=TIMEOUT_S)
    os.kill(worker.pid, signal.SIGCONT)
    result.get(timeout=TIMEOUT_S, propagate=False)
    assert result.state == state


@pytest.mark.parametrize("task", ["durable.once", "job.part"])
def test_a_caller_is_told_of_a_result_that_the_worker_keeps(
    site: Site, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr(waiting, "BACK_OFF_S", (3600.0,))
    site.start()
    assert site.sig(task, 7).delay().get(timeout=TIMEOUT_S) == 7


def stat_of(pid: int) -> str:
    """The state of a process; T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]

"""A row that a newer version wrote is left alone, and holds up nothing."""

from __future__ import annotations

import json
import logging

import pytest

from celery_sidejob.model.messages import Continuation
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store.outbox import doorbells
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def test_a_continuation_of_a_newer_format_waits_for_a_newer_sweeper(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    signature = dict(stage.app.signature("somebody.else"))
    for name, version in (("newer", 2), ("ours", 1)):
        text = json.dumps({"v": version, "signature": signature, "args": [], "options": {}})
        kept = Continuation(name, "celery", text)
        doorbells.keep_continuation(stage.runtime.connections, kept, check_interval_s=1)
    job = stage.job()
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET next_check_at = now(), published_at = NULL")

    with caplog.at_level(logging.WARNING):
        report = Sweeper(stage.runtime).run_once()

    assert report is not None
    assert (report.published, report.unpublished) == (2, 1)
    assert "1 continuations are of a newer format" in caplog.text
    assert stage.sql("SELECT task_id FROM messages WHERE job_id IS NULL") == [("continuation:newer",)]
    assert stage.run(job) == "completed"

"""A worker that stops as planned loses nothing, and nothing counts as lost."""

from __future__ import annotations

import pytest

from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.heartbeat.run_ends import QuietEnd
from celery_sidejob.services.sweep.sweeper import Sweeper
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def test_a_job_that_is_locked_when_its_worker_leaves_counts_no_loss(stage: Stage) -> None:
    """Somebody's transaction has the job just then, so the sweeper gives it back a moment later."""
    heartbeat = Heartbeat(stage.runtime)
    job, free = stage.job(), stage.job()
    worker = heartbeat.register()
    for each in (job, free):
        assert stage.claim(each, worker_id=worker) is not None
    with stage.connect(autocommit=False) as other:
        other.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (job.id,))
        assert heartbeat.leave() == 1
    heartbeat.close()
    assert (free.refresh().status, job.refresh().status) == ("queued", "running")

    Sweeper(stage.runtime).run_once()

    assert job.refresh().status == "queued"
    assert job.info["losses"] == 0
    assert stage.run(job) == "completed"


def test_a_worker_that_another_declared_dead_counts_one(stage: Stage) -> None:
    job = stage.job()
    assert stage.claim(job) is not None
    ((pid,),) = stage.sql("SELECT locked_pid FROM messages")
    assert pid is not None
    stage.sql("UPDATE workers SET dead_at = now(), suspect_at = now(), suspect_by = 'silence'")

    Sweeper(stage.runtime).run_once()

    assert job.refresh().status == "queued"
    assert job.info["losses"] == 1
    [lost] = [one.detail for one in job.history if one.what == "lost"]
    assert (lost["kind"], lost["process"]) == ("silent", pid)


def test_a_run_whose_body_has_returned_is_ended_and_not_given_back(database_url: str) -> None:
    """Its end was left to the worker, and cannot be written in a page: its job was asked meanwhile."""
    stage = Stage(database_url, task_ignore_result=True)
    heartbeat = Heartbeat(stage.runtime)
    job = stage.job()
    hold = stage.claim(job, worker_id=heartbeat.register(), in_page=True)
    assert hold is not None
    [told] = stage.leave(hold)
    job.run()
    heartbeat.jobs.ends.add(QuietEnd(told, lambda: hold))

    assert heartbeat.leave() == 0

    heartbeat.close()
    assert [one.what for one in job.history] == ["made", "claimed", "completed"]
    stage.close()


def test_a_run_that_was_claimed_and_has_not_begun_is_undone(stage: Stage) -> None:
    """A page was claimed while its worker stopped, and reached no process."""
    heartbeat = Heartbeat(stage.runtime)
    waits, begun = stage.job(), stage.job()
    worker = heartbeat.register()
    for job in (waits, begun):
        assert stage.claim(job, worker_id=worker, in_page=True) is not None
    heartbeat.runs.accepted(heartbeat.runs.received((begun.id, 1)), 11)

    assert heartbeat.leave() == 2

    heartbeat.close()
    assert [[one.what for one in job.history] for job in (waits, begun)] == [
        ["made"],
        ["made", "claimed", "given back"],
    ]
    assert [stage.run(job) for job in (waits, begun)] == ["completed"] * 2
    assert [job.info["run_no"] for job in (waits, begun)] == [1, 2]

"""`job.waiting_for`: what keeps a job's next run from beginning."""

from __future__ import annotations

from functools import partial

import pytest

from celery_sidejob import JobNotFoundError, RunningJob
from celery_sidejob.operations import waiting
from celery_sidejob.store import workers
from celery_sidejob.store.outbox.kinds import JOBS
from tests.tools.in_process import Stage


@pytest.fixture(autouse=True)
def served(stage: Stage) -> None:
    """The stage's worker serves what it calls."""
    tasks = ["stage.call", "stage.idle", "slow"]
    stage.runtime.connections.transact(
        "serve", partial(waiting.serve, worker_id=stage.worker_id, queues=["celery"], tasks=tasks)
    )


def test_a_job_that_may_run_or_rests_waits_for_nothing(stage: Stage) -> None:
    seen: list[list[str]] = []
    job = stage.job(lambda job: seen.append(job.waiting_for))
    assert job.waiting_for == []
    stage.run(job)
    assert (seen, job.waiting_for) == ([[]], [])


def test_it_waits_for_a_timer(stage: Stage) -> None:
    later = stage.job(countdown=60)
    assert later.waiting_for == ["timer"]
    rests = stage.inside(lambda job: None)
    rests.run(countdown=60)
    assert rests.waiting_for == ["timer"]
    rests.run()
    assert rests.waiting_for == []


def test_it_waits_for_a_retry(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise job.retry(countdown=60)

    job = stage.job(body)
    stage.run(job)
    assert job.waiting_for == ["retry"]
    job.run(force=True)
    assert job.waiting_for == []


def test_it_waits_for_its_rate(stage: Stage) -> None:
    @stage.task(name="slow", run_rate="1/h")
    def slow(job: RunningJob) -> None:
        pass

    job = slow.enqueue()
    assert stage.run(job) == "completed"
    job.run()
    assert job.waiting_for == ["rate"]


def test_it_waits_for_a_worker_that_knows_its_task(stage: Stage) -> None:
    job = stage.job()
    workers.leave(stage.runtime.connections, stage.worker_id)
    assert job.waiting_for == ["no worker"], "not parked yet"
    waiting.decline(stage.runtime, JOBS, (job.id, 1), task="stage.idle")
    assert job.waiting_for == ["no worker"]


def test_it_waits_for_room_on_a_port(stage: Stage) -> None:
    target = stage.job(inports={"a": {"limit": 1}})
    stage.drain()
    target.input("a").write(1)
    writer = stage.inside(lambda job: target.input("a").write(2))
    assert (writer.status, writer.waiting_for) == ("suspended", ["room"])
    with pytest.raises(TimeoutError, match=r"still suspended after 0 s.* It waits for: room"):
        writer.wait(timeout=0)
    target.input("a").read()
    assert writer.waiting_for == []


def test_a_job_that_is_gone_is_not_found(stage: Stage) -> None:
    job = stage.job()
    job.terminate()
    stage.drain()
    job.delete()
    with pytest.raises(JobNotFoundError):
        _ = job.waiting_for

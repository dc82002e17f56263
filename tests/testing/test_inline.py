"""Runs in the test's process: what is due and nothing else, with a limit, in the tasks that this process knows."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob import InvalidValueError, RunningJob
from celery_sidejob.services.heartbeat import held_runs
from celery_sidejob.testing import run_job, run_until_quiet, wait_until
from tests.tools.in_process import Stage


def test_what_is_due_runs_with_all_that_it_leads_to(stage: Stage) -> None:
    def parent(job: RunningJob) -> None:
        if not job.children:
            job.enqueue(stage.idle, child_name="child")
            stage.sidejob.publish("/news", 1)
            stage.job().run(countdown=3600)
            job.suspend()

    reader = stage.job(lambda job: list(job.input("i")), inports={"i": {"channels": ["/news"]}})
    made = stage.job(parent)

    # The reader twice, the parent, its child, the parent for the child's end, and a job that is asked again in an hour.
    assert run_until_quiet(stage.sidejob) == 6
    assert (made.refresh().status, reader.refresh().status) == ("completed", "completed")
    assert stage.sql("SELECT count(*) FROM timers") == [(1,)]
    assert run_until_quiet(stage.sidejob) == 0


def test_one_run_is_done_and_no_more(stage: Stage) -> None:
    job = stage.job(lambda job: job.enqueue(stage.idle, child_name="child"))

    assert run_job(job).status == "completed"
    assert job.children["child"].status == "queued"
    with pytest.raises(AssertionError, match=r"job 1 stage\.call\(1\) \[completed, queue celery\] owes no run now"):
        run_job(job)


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_is_written_before_it_is_raised(stage: Stage, raises: bool) -> None:
    def body(job: RunningJob) -> None:
        raise ZeroDivisionError("no")

    job = stage.job(body)
    if raises:
        with pytest.raises(ZeroDivisionError):
            run_job(job)
    else:
        run_job(job, raise_errors=False)
    assert job.refresh().status == "failed"


def test_errors_of_several_runs_are_raised_one_by_one_or_kept(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise ZeroDivisionError("no")

    for _ in range(2):
        stage.job(body)
    with pytest.raises(ZeroDivisionError):
        run_until_quiet(stage.sidejob)
    assert stage.sidejob.count_jobs() == {"failed": 1, "queued": 1}
    assert run_until_quiet(stage.sidejob, raise_errors=False) == 1
    assert stage.sidejob.count_jobs() == {"failed": 2}


@pytest.mark.parametrize("status", ["suspended", "failed"])
def test_a_job_at_rest_is_not_run_unless_it_is_asked(stage: Stage, status: str) -> None:
    def body(job: RunningJob) -> None:
        job.set(runs=job.run_no)
        job.checkpoint()
        if status == "suspended":
            job.suspend()
        raise ZeroDivisionError("no")

    job = stage.job(body)
    assert run_job(job, raise_errors=False).status == status
    with pytest.raises(AssertionError, match="owes no run now"):
        run_job(job)
    assert (run_until_quiet(stage.sidejob), job.get("runs")) == (0, 1)
    job.run(force=True)
    assert run_job(job, raise_errors=False).get("runs") == 2


def test_a_retry_is_no_error_and_one_for_later_stays(stage: Stage) -> None:
    tried = []

    def body(job: RunningJob) -> None:
        tried.append(job.run_no)
        raise job.retry(countdown=0 if len(tried) < 3 else 3600)

    stage.job(body)
    assert run_until_quiet(stage.sidejob) == 3


def test_what_does_not_come_to_rest_is_named(stage: Stage) -> None:
    stage.job(lambda job: job.run())

    with pytest.raises(AssertionError, match=r"not quiet after 5 runs; due are job 1 \(stage.call\)"):
        run_until_quiet(stage.sidejob, limit=5)


def test_a_task_that_is_not_known_here_is_named(stage: Stage) -> None:
    job = stage.job()
    stage.sql("UPDATE jobs SET task = 'shop.unknown' WHERE id = %s", job.id)

    with pytest.raises(AssertionError, match=r"shop\.unknown is due, and this process does not know it"):
        run_until_quiet(stage.sidejob)


def test_what_cannot_be_run_is_refused_before_anything_runs(stage: Stage) -> None:
    job = stage.job()
    with pytest.raises(InvalidValueError, match=r"run_job\(\) takes a job, as enqueue\(\) returns it, not 1"):
        run_job(job.id)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"run_until_quiet\(\) takes a SideJob, not <Celery stage"):
        run_until_quiet(stage.app)
    for limit in (0, -1, "all", None):
        with pytest.raises(InvalidValueError, match="is a number of runs, from 1 on"):
            run_until_quiet(stage.sidejob, limit=limit)  # type: ignore[arg-type]
    assert job.refresh().status == "queued"
    assert run_until_quiet(stage.sidejob, limit=1) == 1  # as many as there are


def test_no_worker_is_told_of_a_run_that_is_done_here(stage: Stage) -> None:
    job = stage.job(lambda job: job.enqueue(stage.idle, child_name="child") if not job.children else None)
    with stage.app.connection() as connection:
        size = connection.default_channel._size
        before = size("celery")
        run_job(job)
        assert size("celery") == before
        stage.job()
        assert size("celery") == before + 1


def test_a_run_may_take_longer_than_a_lease(stage_database_url: str, stage: Stage, monkeypatch: Any) -> None:
    """Its process is a worker that looks for runs which it holds and does not know."""
    monkeypatch.setattr(held_runs, "GRACE_S", 0.0)
    looks: list[float] = []
    look = held_runs.HeldJobs._take_strays
    monkeypatch.setattr(held_runs.HeldJobs, "_take_strays", lambda self, report: (look(self, report), looks.append(1)))
    quick = Stage(stage_database_url, sidejob_lease=0.5, sidejob_heartbeat_interval=0.2)
    try:
        job = quick.job(lambda job: wait_until(lambda: len(looks) > 1) and job.set(done=True))
        assert run_job(job).get("done") is True

        def eager(job: RunningJob) -> None:
            wait_until(lambda: len(looks) > 4)

        assert quick.task(eager).apply().successful()
    finally:
        quick.close()

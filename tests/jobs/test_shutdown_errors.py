"""No error of a shutdown keeps its job from being terminated, and each error is told: with the job, and in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.operations.runs import recovery
from celery_sidejob.services.heartbeat.run_ends import Stop, end_from_outside
from tests.tools.between import between_look_and_lock
from tests.tools.in_process import Stage


def raises(job: RunningJob) -> None:
    raise RuntimeError("no\x00")


def tries_again(job: RunningJob) -> None:
    raise job.retry(countdown=9)


Shutdown = Callable[[RunningJob], Any]


def terminating(stage: Stage, shutdown: Shutdown, **options: Any) -> Job:
    @stage.task(name="stage.fragile", **options)
    def fragile(job: RunningJob) -> None:
        pass

    fragile.on_shutdown(shutdown)
    job: Job = fragile.enqueue()
    stage.drain()
    job.terminate()
    return job


@pytest.mark.parametrize(
    ("shutdown", "error"),
    [
        (raises, ("RuntimeError", "no\ufffd")),
        (lambda job: job.suspend(), ("IllegalMoveError", "suspend()")),
        (tries_again, ("IllegalMoveError", "retry()")),
    ],
    ids=["raises", "suspends", "retries"],
)
def test_the_error_of_a_shutdown_is_kept_with_the_terminated_job(
    stage: Stage, shutdown: Shutdown, error: tuple[str, str]
) -> None:
    def touches(job: RunningJob) -> None:
        job.set(touched=True)
        shutdown(job)

    job = terminating(stage, touches)
    stage.drain()

    kept = job.refresh().info["error"]
    assert (job.status, job.state, kept["type"]) == ("terminated", {}, error[0])
    assert error[1] in kept["message"]
    assert "touches" in kept["traceback"]
    assert len(stage.sidejob.dead) == 0
    assert job.delete()


def test_the_error_of_a_shutdown_that_its_commit_refuses_is_kept(stage: Stage) -> None:
    other = stage.job()

    def shutdown(job: RunningJob) -> None:
        job.add_alias("taken")
        stage.outside(lambda: other.add_alias("taken"))

    job = terminating(stage, shutdown)
    stage.drain()
    assert (job.refresh().status, job.info["error"]["type"]) == ("terminated", "AliasTakenError")


def test_a_shutdown_of_a_tree_that_asks_a_job_that_is_gone_ends_at_once(stage: Stage) -> None:
    """It is not taken for one whose child was deleted meanwhile, which is tried again."""
    other = stage.job()
    other.terminate()
    stage.drain()
    assert other.delete()
    job = terminating(stage, lambda job: other.run())
    job.terminate(recursive=True)
    assert stage.drain() == 1

    assert (job.refresh().status, job.info["error"]["type"]) == ("terminated", "JobNotFoundError")
    assert (job.info["losses"], len(stage.sidejob.dead)) == (0, 0)


def test_a_shutdown_that_ran_into_its_time_limit_is_over_and_the_limit_is_told(stage: Stage) -> None:
    """The worker has killed its process, and ends the run."""
    job = terminating(stage, raises)
    hold = stage.claim(job)
    assert hold is not None
    stop = Stop("TimeLimitExceeded", "The run took longer than 1 second.")

    assert end_from_outside(stage.runtime, (job.id, hold.run_no), job.task, stop, worker_id=stage.worker_id)

    assert (job.refresh().status, job.info["error"]["type"]) == ("terminated", "TimeLimitExceeded")


def test_a_shutdown_whose_workers_die_is_given_up_and_is_in_the_dead_set(stage: Stage) -> None:
    job = terminating(stage, raises, max_losses=2)
    for _ in range(2):
        hold = stage.claim(job)
        assert hold is not None
        recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    assert (job.refresh().status, job.info["error"]["type"]) == ("terminated", "WorkerLostError")
    assert [(entry.job_id, entry.reason) for entry in stage.sidejob.dead] == [(job.id, "shutdown lost")]
    assert job.delete()
    assert len(stage.sidejob.dead) == 0


def test_a_forced_run_after_a_raising_shutdown_runs_and_leaves_no_error(stage: Stage) -> None:
    job = terminating(stage, raises)
    job.run(force=True)
    stage.drain()
    assert (job.refresh().status, job.info["error"]) == ("completed", None)


def test_a_shutdown_that_becomes_one_of_the_tree_just_before_its_end_takes_along_the_children_that_it_makes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def makes_a_child(job: RunningJob) -> None:
        job.enqueue(stage.idle, child_name="late")

    job = terminating(stage, makes_a_child)
    hold = stage.claim(job)
    assert hold is not None
    again = Job(job.id, runtime=stage.runtime)
    between_look_and_lock(monkeypatch, stage.outside)(lambda: again.terminate(recursive=True))
    stage.perform(hold)
    assert (job.refresh().status, job.children["late"].status) == ("terminated", "terminating")

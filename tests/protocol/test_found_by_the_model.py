"""What the model of the protocol found in the store when it came to know noted asks: each trace, on a real Postgres."""

from __future__ import annotations

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.operations.runs import recovery
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def lose(stage: Stage, job: Job) -> None:
    """Have the job's run claimed by a worker that is dead when the sweeper looks."""
    hold = stage.claim(job, worker_id=stage.new_worker())
    assert hold is not None
    stage.declare_dead(hold.worker_id)
    stage.sidejob.poll()


def statuses(*jobs: Job | None) -> list[str]:
    return [str(job.refresh().status) if job is not None else "missing" for job in jobs]


def test_a_plain_termination_does_not_cancel_a_noted_recursive_one(stage: Stage) -> None:
    parent = stage.job()
    child = parent.enqueue(stage.idle, child_name="c")
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        parent.terminate(recursive=True, transaction=connection)
    parent.terminate()
    stage.drain()
    assert statuses(parent, child) == ["terminated", "terminated"]


def test_a_forced_run_asked_for_after_a_noted_termination_follows_its_shutdown(stage: Stage) -> None:
    ran: list[int] = []
    job = stage.job(lambda job: ran.append(job.run_no))
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        job.terminate(transaction=connection)
    job.run(force=True)
    stage.drain()
    assert (len(ran), statuses(job)) == (2, ["completed"])


def test_a_termination_cancels_the_noted_forced_run_of_a_terminated_job(stage: Stage) -> None:
    job = stage.job()
    job.terminate()
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        job.run(force=True, countdown=3600, transaction=connection)
    job.terminate()
    stage.sql("UPDATE timers SET due_at = now()")
    stage.drain()
    assert statuses(job) == ["terminated"]


def test_a_timer_set_before_a_noted_termination_is_applied_does_not_outlive_it(stage: Stage) -> None:
    job = stage.job()
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        job.terminate(transaction=connection)
        job.run(countdown=3600)
    stage.drain()
    assert statuses(job) == ["terminated"]
    deleted, broken = job.delete(), stage.broken_rules()
    stage.sql("DELETE FROM timers")
    assert (deleted, broken) == (True, [])


def test_a_shutdown_that_was_given_up_makes_no_later_termination_recursive(stage: Stage) -> None:
    job = stage.job()
    stage.sql("UPDATE jobs SET max_losses = 1")
    stage.drain()
    job.terminate(recursive=True)
    lose(stage, job)
    assert statuses(job) == ["terminated"]
    job.run(force=True)
    stage.drain()
    child = job.enqueue(stage.idle, child_name="c")
    stage.drain()
    job.terminate()
    stage.drain()
    assert statuses(job, child) == ["terminated", "completed"]


def test_a_shutdown_that_is_given_up_leaves_a_forced_timer_to_a_queued_job(stage: Stage) -> None:
    """As one that ends: else a job would be terminated, and neither rest nor be deleted."""
    job = stage.job()
    stage.sql("UPDATE jobs SET max_losses = 1")
    stage.drain()
    job.terminate()
    hold = stage.claim(job)
    assert hold is not None
    job.run(force=True, countdown=3600)

    assert recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=stage.worker_id, own=True)

    assert (statuses(job), stage.broken_rules()) == (["queued"], [])
    assert len(stage.sidejob.dead) == 0
    stage.sql("UPDATE timers SET due_at = now()")
    stage.drain()
    assert statuses(job) == ["completed"]


def test_a_recursive_shutdown_that_is_given_up_before_a_forced_run_is_handed_down(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            job.enqueue(stage.idle, child_name="late")

    job = stage.job(body)
    stage.sql("UPDATE jobs SET max_losses = 1")
    hold = stage.claim(job)
    assert hold is not None
    job.terminate(recursive=True)
    stage.perform(hold)
    job.run(force=True)
    lose(stage, job)
    stage.drain()
    assert statuses(job, job.child("late")) == ["completed", "terminated"]


def test_a_child_made_by_the_last_unit_of_a_recursive_shutdown_is_terminated(stage: Stage) -> None:
    @stage.task(name="stage.maker")
    def maker(job: RunningJob) -> None:
        pass

    @maker.on_shutdown
    def shutdown(job: RunningJob) -> None:
        job.enqueue(stage.idle, child_name="late")

    job = stage.sidejob.enqueue(maker)
    job.terminate(recursive=True)
    stage.drain()
    assert statuses(job, job.child("late")) == ["terminated", "terminated"]


def test_a_child_made_in_a_transaction_across_a_recursive_termination_is_terminated(stage: Stage) -> None:
    parent = stage.job()
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        child = parent.enqueue(stage.idle, child_name="late", transaction=connection)
        parent.terminate(recursive=True)
        stage.drain()
    stage.drain()
    assert statuses(parent, child) == ["terminated", "terminated"]


def test_a_forced_run_of_a_child_whose_first_shutdown_was_given_up_is_no_late_child(stage: Stage) -> None:
    parent = stage.job()
    stage.drain()
    child = parent.enqueue(stage.idle, child_name="c")
    stage.sql("UPDATE jobs SET max_losses = 1")
    parent.terminate(recursive=True)
    lose(stage, child)
    stage.drain()
    assert statuses(parent, child) == ["terminated", "terminated"]
    child.run(force=True)
    stage.drain()
    assert statuses(child) == ["completed"]


def test_a_late_childs_run_that_was_taken_from_its_worker_does_not_terminate_it(stage: Stage) -> None:
    """It was terminated by another, and revived since."""
    parent = stage.job()
    stage.drain()
    with stage.connect(autocommit=False) as connection:
        child = parent.enqueue(stage.idle, child_name="late", transaction=connection)
        parent.terminate(recursive=True)
    zombie = stage.claim(child, worker_id=stage.new_worker())
    assert zombie is not None
    stage.declare_dead(zombie.worker_id)
    stage.sidejob.poll()
    stage.drain()
    assert statuses(parent, child) == ["terminated", "terminated"]
    child.run(force=True)
    stage.drain()
    stage.perform(zombie)
    assert statuses(child) == ["completed"]
    assert "no longer its current run" in stage.ignored[child.id]

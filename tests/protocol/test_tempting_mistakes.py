"""Mistakes of the model that the store does not make, where no other test follows their trace."""

from __future__ import annotations

import pytest

from celery_sidejob import RunningJob
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.outbox.publishing import mark_published
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def test_an_accepted_timer_still_asks_a_job_that_has_failed_since(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            raise ValueError("the first run")

    job = stage.job(body)
    job.run(countdown=3600)
    stage.drain()
    assert job.refresh().status == "failed"
    stage.sql("UPDATE timers SET due_at = now()")
    stage.drain()
    assert job.refresh().status == "completed"


def test_a_plain_run_that_was_only_noted_revives_no_failed_job(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("every run")

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    with stage.connect(autocommit=False) as connection:
        job.run(transaction=connection)
        job.run(countdown=3600, transaction=connection)
        stage.perform(hold)
    stage.drain()
    stage.sql("UPDATE timers SET due_at = now()")
    stage.drain()
    assert (job.refresh().status, job.info["run_no"]) == ("failed", 1)


def test_a_claim_leaves_the_forced_run_that_was_noted_after_a_termination(stage: Stage) -> None:
    happened: list[int] = []
    job = stage.job(lambda job: happened.append(job.run_no))
    with stage.connect(autocommit=False) as connection:
        job.terminate(transaction=connection)
        job.run(force=True, transaction=connection)
    assert stage.run(job) == "completed"  # its first run was claimed before anybody applied what is noted
    stage.drain()
    assert (happened, job.refresh().status) == ([1, 3], "completed")  # the second was the shutdown


def test_a_copy_of_a_message_begins_no_run_before_its_time(stage: Stage) -> None:
    """A retry waits for its backoff, though a copy that announces the same run may already be in the broker."""
    job = stage.job()
    stage.sql("UPDATE messages SET due_at = now() + interval '1 hour'")
    assert stage.claim(job, for_run=1) is None
    stage.sql("UPDATE messages SET due_at = now()")
    assert stage.claim(job, for_run=1) is not None


def test_the_message_of_a_run_in_progress_is_not_looked_at(stage: Stage) -> None:
    next_check_at = "SELECT next_check_at = 'infinity', for_run FROM messages"
    job = stage.job()
    stage.runtime.connections.write_behind_now()
    stage.sql("UPDATE messages SET published_at = NULL")  # whoever publishes it has not marked it yet
    hold = stage.claim(job)
    assert stage.sql(next_check_at) == [(True, 1)]
    mark_published(stage.runtime.connections, JOBS, [(job.id, 1)])
    assert stage.sql(next_check_at) == [(True, 1)]
    job.run()
    assert hold is not None
    stage.perform(hold)
    assert stage.sql(next_check_at) == [(False, 2)]
    stage.drain()

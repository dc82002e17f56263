"""A job's timers are listed, and each can be cancelled until it fires."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import Connection
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_sidejob import (
    NO_DATA,
    IllegalMoveError,
    InvalidValueError,
    Job,
    JobNotFoundError,
    RunningJob,
    StoreUnavailableError,
    Suspend,
    Timer,
)
from celery_sidejob.operations.changes.follow_up import apply_noted_asks
from celery_sidejob.store import asks
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct

LATER = datetime(2099, 1, 1, tzinfo=UTC)


def fails(job: RunningJob) -> None:
    raise ZeroDivisionError("no")


def at_rest(stage: Stage, body: Any = None, **options: Any) -> Job:
    """A job that has run once."""
    job = stage.job(body, **options)
    stage.drain()
    return job.refresh()


def pass_time(stage: Stage) -> None:
    """Have all timers be due."""
    stage.sql("UPDATE timers SET due_at = now() WHERE due_at > now()")


@contextmanager
def session(stage: Stage) -> Iterator[Session]:
    engine = create_engine(direct(stage.database_url).replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as opened:
        yield opened
    engine.dispose()


# -- listing ---------------------------------------------------------------------------------------------------------


def test_a_job_lists_its_timers_soonest_first(stage: Stage) -> None:
    job = stage.job(countdown=60)
    job.run(eta=LATER, force=True)
    job.run(countdown=timedelta(seconds=5))

    soon, later, last = job.timers

    assert [timer.ask for timer in (soon, later, last)] == ["run", "run", "force"]
    assert last.due_at == LATER
    assert soon.due_at is not None
    assert later.due_at is not None
    assert soon.due_at < later.due_at
    assert len({timer.id for timer in job.timers}) == 3


def test_a_timer_that_has_fired_is_not_listed(stage: Stage) -> None:
    job = stage.job(countdown=60)
    pass_time(stage)
    stage.drain()
    assert job.timers == []


def test_asks_that_a_transaction_has_noted_are_no_timers_but_those_for_later_are(stage: Stage) -> None:
    job = at_rest(stage)
    with stage.connect(autocommit=False) as connection:
        job.run(transaction=connection)
        job.terminate(transaction=connection)
        job.run(countdown=60, force=True, transaction=connection)
    assert [timer.ask for timer in job.timers] == ["force"]


def test_the_timers_of_a_job_that_is_gone_are_an_error(stage: Stage) -> None:
    job = at_rest(stage)
    job.terminate()
    stage.drain()
    assert job.timers == []
    job.delete()
    with pytest.raises(JobNotFoundError):
        _ = job.timers
    with pytest.raises(JobNotFoundError):
        job.cancel_timer(1)


def test_in_a_run_they_are_as_its_unit_leaves_them(stage: Stage) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        (first,) = job.timers
        assert job.cancel_timer(first)
        assert not job.cancel_timer(first)
        seen.append(job.timers)
        job.run(eta=LATER)
        job.run(countdown=9, force=True)
        seen.append(job.timers)
        new = job.enqueue(stage.idle, child_name="new", eta=LATER)
        seen.append(new.timers)
        job.checkpoint()
        seen.append([timer.due_at for timer in new.timers])
        seen.append([timer.id is None for timer in job.timers])
        job.terminate()
        seen.append(job.timers)

    job = stage.job(body)
    job.run(countdown=60)
    stage.run(job)

    assert seen == [
        [], [Timer(None, LATER, "run"), Timer(None, None, "force")], [Timer(None, LATER, "run")], [LATER],
        [False, False], [],
    ]  # fmt: skip
    stage.drain()


def test_a_job_of_an_open_transaction_shows_no_timer_yet(stage: Stage) -> None:
    with stage.connect(autocommit=False) as connection:
        job = stage.sidejob.enqueue(stage.idle, countdown=60, transaction=connection)
        assert job.timers == []
    assert len(job.timers) == 1


# -- cancelling ------------------------------------------------------------------------------------------------------


def test_a_cancelled_timer_never_fires(stage: Stage) -> None:
    job = at_rest(stage)
    job.run(countdown=60)
    job.run(countdown=90)
    first, second = job.timers

    assert job.cancel_timer(first)

    assert job.timers == [second]
    assert job.refresh().status == "queued"
    pass_time(stage)
    assert stage.drain() == 1


@pytest.mark.parametrize("by_id", [True, False])
def test_it_is_there_once(stage: Stage, by_id: bool) -> None:
    job = stage.job(countdown=60)
    (timer,) = job.timers
    which: Any = timer.id if by_id else timer
    assert job.cancel_timer(which) is True
    assert job.cancel_timer(which) is False


def test_the_timer_of_another_job_is_not_there(stage: Stage) -> None:
    job, other = stage.job(countdown=60), stage.job(countdown=60)
    (timer,) = other.timers
    assert not job.cancel_timer(timer)
    assert other.timers == [timer]


def test_what_a_transaction_has_noted_is_no_timer_to_cancel(stage: Stage) -> None:
    job = at_rest(stage)
    with stage.connect(autocommit=False) as connection:
        job.terminate(transaction=connection)
    ((noted,),) = stage.sql("SELECT id FROM timers")
    assert not job.cancel_timer(noted)
    assert stage.drain() == 1


@pytest.mark.parametrize("wrong", [None, 0, -1, True, "7", 1.5, 2**63])
def test_what_is_no_timer_is_refused(stage: Stage, wrong: Any) -> None:
    job = stage.job()
    with pytest.raises(InvalidValueError, match=r"cancel_timer\(\) takes one of job.timers, or its id"):
        job.cancel_timer(wrong)


def test_a_timer_without_a_number_yet_is_refused(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.run(countdown=60)
        with pytest.raises(InvalidValueError, match="no id before the commit"):
            job.cancel_timer(job.timers[0])

    stage.inside(body)


# -- the job then rests ----------------------------------------------------------------------------------------------


def test_a_job_that_never_ran_is_suspended_and_can_be_asked(stage: Stage) -> None:
    job = stage.job(countdown=60)
    task_id = job.task_id
    assert job.cancel_timer(job.timers[0])
    assert (job.refresh().status, job.task_id) == ("suspended", task_id)
    assert job.run() is not None
    assert stage.drain() == 1
    assert (job.refresh().status, job.task_id) == ("completed", task_id)


@pytest.mark.parametrize("status", ["completed", "suspended"])
def test_a_job_rests_as_it_did_before(stage: Stage, status: str) -> None:
    job = at_rest(stage, (lambda job: job.suspend()) if status == "suspended" else None)
    job.run(countdown=60)
    job.run(countdown=90)
    for timer in job.timers:
        assert job.refresh().status == "queued"
        job.cancel_timer(timer)
    assert job.refresh().status == status
    assert stage.drain() == 0


def test_a_job_that_is_suspended_in_its_second_asking_is_suspended_again(stage: Stage) -> None:
    asked: list[int] = []

    def body(job: RunningJob) -> None:
        asked.append(job.run_no)
        if len(asked) > 1:
            job.suspend()

    job = at_rest(stage, body)
    job.run()
    stage.drain()
    assert job.refresh().status == "suspended"
    task_id = job.task_id
    job.run(countdown=60)
    assert job.cancel_timer(job.timers[0])
    assert (job.refresh().status, job.task_id) == ("suspended", task_id)


def test_a_failed_job_is_failed_again_and_in_the_dead_set(stage: Stage) -> None:
    job = at_rest(stage, fails)
    job.run(force=True, countdown=60)
    assert (job.refresh().status, len(stage.sidejob.dead)) == ("queued", 0)

    assert job.cancel_timer(job.timers[0])

    (entry,) = stage.sidejob.dead
    assert (job.refresh().status, entry.job_id, entry.error) == ("failed", job.id, "ZeroDivisionError: no")
    assert entry.task_id == job.task_id
    assert "fails" in entry.traceback
    assert job.run() is None


def test_it_is_there_for_the_same_reason(stage: Stage) -> None:
    job = stage.job()
    stage.sql("UPDATE jobs SET max_losses = 1")
    lost = stage.new_worker()
    assert stage.claim(job, worker_id=lost)
    stage.declare_dead(lost)
    stage.sidejob.poll()
    (before,) = stage.sidejob.dead
    job.run(force=True, countdown=60)
    job.cancel_timer(job.timers[0])
    (after,) = stage.sidejob.dead
    assert (before.reason, after.reason, after.error) == ("lost", "lost", before.error)


@pytest.mark.parametrize("rests_first", [True, False])
def test_a_terminated_job_is_terminated_again(stage: Stage, rests_first: bool) -> None:
    """Its shutdown is repeated: asking for a forced run had revived it."""
    job = at_rest(stage) if rests_first else stage.job()
    job.terminate()
    stage.drain()
    job.run(force=True, countdown=60)
    assert job.refresh().status == "queued"

    assert job.cancel_timer(job.timers[0])

    assert job.refresh().status == "terminating"
    assert stage.drain() == 1
    assert job.refresh().status == "terminated"
    assert job.delete()


def test_a_job_whose_forced_timer_outlived_its_shutdown_is_terminated_again(stage: Stage) -> None:
    job = at_rest(stage)
    job.terminate()
    job.run(force=True, countdown=60)
    stage.drain()
    assert job.refresh().status == "queued"
    assert job.cancel_timer(job.timers[0])
    stage.drain()
    assert job.refresh().status == "terminated"


def test_a_job_that_is_owed_a_run_stays_queued(stage: Stage) -> None:
    job = stage.job()
    job.run(countdown=60)
    assert job.cancel_timer(job.timers[0])
    assert job.refresh().status == "queued"
    assert stage.drain() == 1
    assert job.refresh().status == "completed"


def test_a_retry_that_waits_is_no_timer_and_stays(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise job.retry(countdown=60)

    job = at_rest(stage, body)
    job.run(countdown=60)
    (timer,) = job.timers
    assert job.cancel_timer(timer)
    assert job.refresh().status == "queued"
    job.run(force=True)
    assert stage.drain() == 1


def test_a_status_change_is_told(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str | None, str]] = []
    job = at_rest(stage)
    job.run(countdown=60)
    monkeypatch.setattr(stage.runtime.observer, "tell", lambda event: told.append((event.before, event.after)))
    job.cancel_timer(job.timers[0])
    assert told == [("queued", "completed")]


# -- in a run --------------------------------------------------------------------------------------------------------


def test_a_run_cancels_the_timer_it_has_set(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.run(countdown=60)
        job.checkpoint()
        assert job.cancel_timer(job.timers[0])

    job = stage.inside(body)
    assert (job.status, job.timers) == ("completed", [])


def test_the_cancelling_of_a_run_that_raises_is_dropped_with_its_unit(stage: Stage) -> None:
    other = stage.job(countdown=60)

    def body(job: RunningJob) -> None:
        assert other.cancel_timer(other.timers[0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage.inside(body)
    assert len(other.timers) == 1


def test_a_run_cancels_the_timer_of_another_job(stage: Stage) -> None:
    other = stage.job(countdown=60)
    stage.inside(lambda job: other.cancel_timer(other.timers[0]))
    assert (other.refresh().status, other.timers) == ("suspended", [])


def test_a_timer_that_fires_before_the_unit_commits_is_not_cancelled(stage: Stage) -> None:
    other = stage.job(countdown=60)

    def fire() -> None:
        pass_time(stage)
        apply_noted_asks(stage.runtime, [other.id])

    def body(job: RunningJob) -> None:
        assert other.cancel_timer(other.timers[0])
        stage.outside(fire)

    stage.inside(body)
    assert stage.drain() == 1
    assert other.refresh().status == "completed"


def test_a_block_cancels_the_own_timers_of_its_job_alone(stage: Stage) -> None:
    other = stage.job(countdown=60)

    def body(job: RunningJob) -> None:
        with session(stage) as lent:
            with job.unit(transaction=lent):
                assert job.cancel_timer(job.timers[0])
            lent.commit()
            with pytest.raises(IllegalMoveError, match="cannot be part of"), job.unit(transaction=lent):
                other.cancel_timer(other.timers[0])
            lent.rollback()

    job = stage.job(body)
    job.run(countdown=60)
    stage.run(job)
    assert (job.refresh().status, job.timers, len(other.timers)) == ("completed", [], 1)


# -- races -----------------------------------------------------------------------------------------------------------

Aside = Callable[..., "Future[Any]"]


def held(stage: Stage, job: Job) -> Connection[Any]:
    """Have another connection hold the lock under which timers fire and are cancelled."""
    connection = stage.connect(autocommit=False)
    connection.execute("SELECT FROM jobs WHERE id = %s FOR NO KEY UPDATE", [job.id])
    return connection


def test_a_timer_that_fires_while_its_cancelling_waits_has_fired(stage: Stage, aside: Aside) -> None:
    job = at_rest(stage)
    job.run(countdown=60)
    (timer,) = job.timers
    pass_time(stage)
    with held(stage, job) as connection:
        cancelling = aside(job.cancel_timer, timer)
        stage.wait_for_waiters()
        connection.execute("DELETE FROM timers WHERE job_id = %s", [job.id])
        connection.execute("UPDATE jobs SET wakes = wakes + 1 WHERE id = %s", [job.id])
        connection.execute(
            "INSERT INTO messages (task_id, job_id, for_run, queue, check_interval)"
            " VALUES ('fired', %s, 2, 'celery', '30 s')", [job.id],
        )  # fmt: skip
        connection.commit()
        assert cancelling.result(10) is False
    connection.close()
    assert job.refresh().status == "queued"
    assert stage.drain() == 1


def test_a_timer_that_is_cancelled_while_it_would_fire_does_not(stage: Stage, aside: Aside) -> None:
    """The sweeper has seen it due. It leaves a job that is locked, and finds nothing when it looks again."""
    job = at_rest(stage)
    job.run(countdown=60)
    (timer,) = job.timers
    pass_time(stage)
    with held(stage, job) as connection:
        cancelling = aside(job.cancel_timer, timer)
        stage.wait_for_waiters()
        assert [row.job_id for row in asks.due(stage.runtime.connections, 10)] == [job.id]
        apply_noted_asks(stage.runtime, [job.id])
        connection.commit()
        assert cancelling.result(10) is True
    connection.close()
    apply_noted_asks(stage.runtime, [job.id])
    assert (job.refresh().status, stage.drain()) == ("completed", 0)


def test_a_claim_that_takes_a_due_timer_has_taken_it_from_its_cancelling(stage: Stage) -> None:
    """The run that begins is what the timer has asked for."""
    job = stage.job()
    job.run(countdown=60)
    (timer,) = job.timers
    pass_time(stage)
    hold = stage.claim(job)
    assert hold is not None
    assert not job.cancel_timer(timer)
    stage.perform(hold)
    assert job.refresh().status == "completed"


def test_a_cancelling_whose_answer_was_lost_is_done_once(stage: Stage, at: Arm) -> None:
    job = stage.job(countdown=60)
    (timer,) = job.timers
    at("cancel:after-commit", lost)
    with pytest.raises(StoreUnavailableError):
        job.cancel_timer(timer)
    assert (job.timers, job.refresh().status) == ([], "suspended")


# -- the timeout of a wait -------------------------------------------------------------------------------------------


def waits(job: RunningJob) -> None:
    """Wait for a packet, but not for ever."""
    if job.input("in").read() is NO_DATA and job.run_no == 1:
        job.suspend(timeout=timedelta(hours=1))


def waiting_job(stage: Stage, body: Any = waits) -> Job:
    job = at_rest(stage, body, inports=["in"])
    assert (job.status, job.waiting_for) == ("suspended", ["timer"])
    return job


def test_a_timeout_asks_for_a_run_when_nothing_else_has(stage: Stage) -> None:
    job = waiting_job(stage)
    (timer,) = job.timers
    assert timer.ask == "timeout"
    assert timer.due_at is not None
    assert timedelta(minutes=59) < timer.due_at - datetime.now(UTC) <= timedelta(hours=1)
    assert stage.drain() == 0

    pass_time(stage)
    stage.sidejob.poll()
    assert (stage.drain(), job.refresh().status, job.timers) == (1, "completed", [])


def test_a_timeout_is_gone_with_the_next_run(stage: Stage) -> None:
    job = waiting_job(stage)
    job.input("in").write(1)
    assert (stage.drain(), job.refresh().status, job.timers) == (1, "completed", [])

    pass_time(stage)
    stage.sidejob.poll()
    assert (stage.drain(), job.refresh().info["run_no"]) == (0, 2)


def test_each_wait_has_its_own_timeout(stage: Stage) -> None:
    def waits_twice(job: RunningJob) -> None:
        if job.run_no < 3:
            job.suspend(timeout=3600.0 * job.run_no)

    job = waiting_job(stage, waits_twice)
    job.run()
    stage.drain()
    (timer,) = job.timers
    assert timer.due_at is not None
    assert timer.due_at - datetime.now(UTC) > timedelta(hours=1, minutes=59)


def test_a_timeout_that_fires_beside_another_ask_makes_one_run(stage: Stage) -> None:
    job = waiting_job(stage)
    job.input("in").write(1)
    pass_time(stage)
    stage.sidejob.poll()
    assert (stage.drain(), job.refresh().status, job.timers) == (1, "completed", [])


def test_a_run_that_was_asked_meanwhile_waits_for_no_timeout(stage: Stage) -> None:
    job = stage.job(waits, inports=["in"])
    hold = stage.claim(job)
    assert hold is not None
    job.run()
    stage.perform(hold)
    assert (job.refresh().status, len(job.timers)) == ("queued", 1)
    assert (stage.drain(), job.refresh().status, job.timers) == (1, "completed", [])


def test_a_run_that_waits_with_a_timeout_is_suspended_whatever_timers_it_has_or_had(stage: Stage) -> None:
    has, had = (stage.job(waits, inports=["in"]) for _ in range(2))
    has.run(countdown=7200)
    assert stage.run(has) == "suspended"
    assert sorted(timer.ask for timer in has.timers) == ["run", "timeout"]

    hold = stage.claim(had)
    assert hold is not None
    had.run(countdown=7200)
    assert had.cancel_timer(had.timers[0])
    stage.perform(hold)
    assert (had.refresh().status, [timer.ask for timer in had.timers]) == ("suspended", ["timeout"])


def test_a_timeout_is_cancelled_like_any_timer_and_by_a_termination(stage: Stage) -> None:
    cancelled, terminated, rescheduled = (waiting_job(stage) for _ in range(3))
    assert cancelled.cancel_timer(cancelled.timers[0])
    assert (cancelled.refresh().status, cancelled.timers) == ("suspended", [])
    terminated.terminate()
    assert terminated.timers == []

    rescheduled.run(countdown=60)
    timeout, run = sorted(rescheduled.timers, key=lambda timer: timer.ask, reverse=True)
    assert rescheduled.cancel_timer(run if run.ask == "run" else timeout)
    assert (rescheduled.refresh().status, [timer.ask for timer in rescheduled.timers]) == ("suspended", ["timeout"])


def test_a_body_that_catches_the_suspend_sets_no_timer(stage: Stage) -> None:
    def goes_on(job: RunningJob) -> None:
        with suppress(Suspend):
            job.suspend(timeout=60)

    job = at_rest(stage, goes_on)
    assert (job.status, job.timers) == ("completed", [])


def test_no_timeout_or_one_of_nothing_asks_at_once_or_never(stage: Stage) -> None:
    assert at_rest(stage, lambda job: job.suspend()).timers == []

    def at_once(job: RunningJob) -> None:
        if job.run_no < 3:
            job.suspend(timeout=0)

    job = at_rest(stage, at_once)
    assert (job.status, job.info["run_no"]) == ("completed", 3)


@pytest.mark.parametrize("timeout", ["soon", float("nan"), -1, True, 1e300])
def test_a_wrong_timeout_is_refused(stage: Stage, timeout: Any) -> None:
    job = at_rest(stage, lambda job: job.suspend(timeout=timeout))
    assert job.status == "failed"
    assert "timeout is a timedelta or a number of seconds from 0 to 10000000000" in stage.sidejob.dead.list()[0].error

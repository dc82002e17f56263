"""Assertions about the store, what they say when they fail, and a clock that is moved."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from celery_sidejob import InvalidValueError, RunningJob
from celery_sidejob.testing import (
    assert_dead,
    assert_enqueued,
    assert_packets,
    move_clock,
    refute_enqueued,
    run_job,
    run_until_quiet,
    wait_until,
)
from tests.tools.apps import make_app
from tests.tools.in_process import Stage


@pytest.fixture
def mail(stage: Stage) -> Any:
    """A durable task."""

    @stage.app.task(name="shop.mail", durable=True, shared=False)
    def mail(to: str, copies: int = 1) -> str:
        return to

    return mail


def test_what_is_enqueued_is_found_by_what_is_given(stage: Stage, mail: Any) -> None:
    job = stage.sidejob.enqueue(stage.call, (1,), queue="math", countdown=3600)
    sent = mail.apply_async(("ada",), {"copies": 2})

    assert assert_enqueued(stage.call) == assert_enqueued("stage.call", [1], {}, queue="math", sidejob=stage.sidejob)
    assert assert_enqueued(stage.call, (1,)) == job
    assert assert_enqueued(mail, ("ada",), {"copies": 2}).task_id == sent.id
    refute_enqueued(stage.idle)
    refute_enqueued(mail, ("bob",))
    refute_enqueued(stage.call, queue="celery")


def test_the_message_lists_what_is_enqueued(stage: Stage, mail: Any) -> None:
    with pytest.raises(AssertionError, match=r"^shop\.mail\('bob'\) is not enqueued; there is nothing\.$"):
        assert_enqueued(mail, ("bob",))

    stage.sidejob.enqueue(stage.call, (1,), queue="math")
    mail.delay("ada", copies=2)
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(mail, ("bob",), queue="post")
    assert str(caught.value).splitlines() == [
        "shop.mail('bob') in queue 'post' is not enqueued; there are:",
        "  job 1 stage.call(1) [queued, queue math]",
        "  durable task shop.mail('ada', copies=2) [queue celery]",
    ]
    with pytest.raises(AssertionError, match=r"^shop\.mail is enqueued; there are:\n  durable task shop\.mail\('ada'"):
        refute_enqueued(mail)


def test_another_app_that_is_not_configured_is_none_of_a_job_s(stage: Stage) -> None:
    other = make_app("beside", sidejob_database_url=7)
    try:
        job = stage.job(lambda job: None)
        run_job(job)
        assert job.status == "completed"
    finally:
        other.close()


def test_the_newest_entry_of_the_dead_set_is_found(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError(f"number {job.id}")

    jobs = [stage.job(body) for _ in range(2)]
    with pytest.raises(AssertionError, match=r"No entry stage\.call is in the dead set; there is nothing\."):
        assert_dead(stage.call)
    for job in jobs:
        run_job(job, raise_errors=False)

    assert assert_dead(stage.call).job_id == jobs[1].id
    assert assert_dead(job=jobs[0], error="number 1").reason == "failed"
    with pytest.raises(AssertionError, match=r"with 'number 3' is in the dead set; there are:\n  stage\.call \[failed"):
        assert_dead(error="number 3", sidejob=stage.sidejob)


def test_packets_stay_on_their_port(stage: Stage) -> None:
    job = stage.job()
    job.input("i").write_many([1, 2])

    assert_packets(job.input("i"), [1, 2])
    assert_packets(job.input("i"), (1, 2))
    with pytest.raises(AssertionError, match=r"<Port in:i of job 1> has \[1, 2\], not \[1, 3\]; .* number 1 on"):
        assert_packets(job.input("i"), [1, 3])
    with pytest.raises(AssertionError, match="number 2 on"):
        assert_packets(job.input("i"), [1, 2, 3])


def test_timers_retries_and_durable_tasks_obey_the_clock(stage: Stage, mail: Any) -> None:
    stage.job(lambda job: None if job.request.retries else _again(job), countdown=3600)
    mail.apply_async(("ada",), countdown=7200)
    assert run_until_quiet(stage.sidejob) == 0

    move_clock(timedelta(hours=1), sidejob=stage.sidejob)
    assert run_until_quiet(stage.sidejob) == 1
    move_clock(3000, sidejob=stage.sidejob)
    assert run_until_quiet(stage.sidejob) == 0
    move_clock(600, sidejob=stage.sidejob)
    assert run_until_quiet(stage.sidejob) == 2
    assert stage.row_counts()["messages"] == 0


def test_the_clock_moves_although_a_worker_writes_the_same_rows_in_another_order(stage: Stage) -> None:
    """Postgres ends the move, whose wait for the second job closes a ring; the worker goes on."""
    first, second = stage.job(lambda job: None), stage.job(lambda job: None)
    created = stage.sql("SELECT created_at FROM jobs ORDER BY id")
    worker = psycopg.connect(stage.sidejob.settings.require_database_url())
    lock = sql.SQL("SELECT FROM {} WHERE id = %s FOR UPDATE").format(
        sql.Identifier(stage.sidejob.settings.schema, "jobs")
    )
    with worker, ThreadPoolExecutor(1) as threads:
        worker.execute("SET LOCAL deadlock_timeout = '60s'")
        worker.execute(lock, [second.id])
        moved = threads.submit(move_clock, 60, sidejob=stage.sidejob)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: stage.sql(waits) == [(1,)])
        worker.execute(lock, [first.id])  # the move has written this row
        worker.commit()
        moved.result()
    assert stage.sql("SELECT created_at FROM jobs ORDER BY id") == [(at - timedelta(minutes=1),) for (at,) in created]


def test_schedules_obey_the_clock(stage: Stage) -> None:
    """By the calendar, as long as it takes for a time to come, and once each: also if the clock is moved in steps."""
    by_interval = stage.sidejob.schedule("hourly", stage.idle, every=3600, catch_up="all")
    (wanted,) = by_interval.next_times(1)
    move_clock(3500, sidejob=stage.sidejob)
    assert stage.sidejob.poll().scheduled == 0
    assert by_interval.next_times(1) == [wanted - timedelta(seconds=3500)]
    move_clock(100, sidejob=stage.sidejob)
    assert stage.sidejob.poll().scheduled == 1
    move_clock(7200, sidejob=stage.sidejob)
    assert stage.sidejob.poll().scheduled == 2

    by_interval.delete()
    now = stage.sql("SELECT now()")[0][0].astimezone(UTC)
    hour = (now.hour + 12) % 24
    daily = stage.sidejob.schedule("daily", stage.idle, cron=f"0 {hour} * * *", timezone="UTC", catch_up="all")
    (at,) = daily.next_times(1)
    left = (at - now).total_seconds()
    for part in (left / 3, left / 3, left / 3 - 300):
        move_clock(part, sidejob=stage.sidejob)
        assert stage.sidejob.poll().scheduled == 0
    for days, due in ((0, 1), (1, 1), (3, 3)):
        move_clock(timedelta(days=days, minutes=0 if days else 6), sidejob=stage.sidejob)
        assert stage.sidejob.poll().scheduled == due


def test_a_paused_schedule_and_one_with_jitter_obey_the_clock(stage: Stage) -> None:
    paused = stage.sidejob.schedule("paused", stage.idle, every=60)
    paused.pause()
    stage.sidejob.schedule("spread", stage.idle, every=3600, jitter=600, catch_up="all")
    move_clock(3600 * 4 + 600, sidejob=stage.sidejob)
    assert stage.sidejob.poll().scheduled in {4, 5}
    assert stage.sidejob.poll().scheduled == 0
    assert paused.count == 0


def test_what_may_not_begin_now_is_quiet(stage: Stage, mail: Any) -> None:
    stage.sidejob.queue("celery").configure(rate="1/h")
    for name in ("ada", "bob"):
        mail.delay(name)
    stage.job(lambda job: None)
    assert [run_until_quiet(stage.sidejob, limit=10) for _ in range(2)] == [2, 0]
    assert stage.row_counts()["messages"] == 1

    stage.sidejob.queue("celery").configure(rate=None, limit=1)
    stage.sql("UPDATE messages SET locked_by = %s, locked_at = now()", stage.worker_id)  # runs on another worker
    mail.delay("eve")
    assert run_until_quiet(stage.sidejob, limit=10) == 0


def test_jobs_of_a_key_that_has_its_run_are_left_alone(stage: Stage) -> None:
    stage.sidejob.queue("keyed").configure(limit_per_key=1)
    first, _, other = (stage.job(lambda job: None, queue="keyed", limit_key=key) for key in "aab")
    hold = stage.claim(first)
    assert run_until_quiet(stage.sidejob, limit=10) == 1
    assert other.refresh().status == "completed"
    assert hold is not None
    stage.perform(hold)
    assert run_until_quiet(stage.sidejob, limit=10) == 1


def test_a_job_that_may_not_run_now_says_why(stage: Stage) -> None:
    job = stage.job(lambda job: None, queue="mail")
    stage.sidejob.queue("mail").pause()
    with pytest.raises(AssertionError, match=r"owes no run now: it waits for: pause\."):
        run_job(job)


def test_the_age_of_what_is_kept_obeys_the_clock_and_workers_live_on(stage: Stage) -> None:
    beat = stage.sql("SELECT beat_at FROM workers")
    job = stage.job(lambda job: 1 / 0)
    run_job(job, raise_errors=False)
    move_clock(timedelta(days=179), sidejob=stage.sidejob)
    stage.sidejob.poll()
    assert_dead(stage.call)

    move_clock(timedelta(days=2), sidejob=stage.sidejob)
    stage.sidejob.poll()
    assert len(stage.sidejob.dead) == 0
    assert stage.sql("SELECT beat_at FROM workers") == beat


def test_a_lease_that_a_run_renews_itself_obeys_the_clock(stage: Stage) -> None:
    """The worker of the run takes it away, whose next commit is refused; then it runs again."""

    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            move_clock(timedelta(hours=1), sidejob=stage.sidejob)
            wait_until(lambda: stage.sql("SELECT losses FROM jobs") == [(1,)])
        job.set(written_by=job.run_no)

    task = stage.task(body, name="stage.renews", lease_renewal="manual", lease=3600)
    job = task.enqueue()
    assert run_job(job).status == "queued"
    assert run_job(job).get("written_by") == 2


@pytest.mark.parametrize("by", [-1, "an hour", float("nan"), timedelta(seconds=-1)])
def test_time_only_passes(stage: Stage, by: Any) -> None:
    with pytest.raises(InvalidValueError, match="takes a number of seconds from 0 to 10000000000, or a timedelta"):
        move_clock(by)


def _again(job: RunningJob) -> None:
    raise job.retry(countdown=3600)

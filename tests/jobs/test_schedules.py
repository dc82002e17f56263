"""Schedules: each of their times is made once, whatever happens meanwhile, and no more than was asked is caught up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_sidejob import (
    CapacityPool,
    InvalidValueError,
    Job,
    RunningJob,
    Schedule,
    ScheduleNotFoundError,
    SettingsError,
    StoreUnavailableError,
    UnknownTaskError,
)
from celery_sidejob.jobs import schedule as scheduling
from celery_sidejob.model import schedule as model_schedule
from celery_sidejob.model.crash_points import Died
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import schedules as rows
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import EMPTY, Stage
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
"""For schedules of which no further time may come due while a slow machine runs a test."""


def store_time(stage: Stage) -> datetime:
    found: datetime = stage.sql("SELECT clock_timestamp()")[0][0]
    return found.astimezone(UTC)


def past(stage: Stage, seconds: float) -> datetime:
    return store_time(stage) - timedelta(seconds=seconds)


def sweep(stage: Stage) -> int:
    """Sweep once by hand, and return how many jobs schedules have made."""
    return int(stage.sidejob.poll().scheduled)


def made(stage: Stage, name: str = "tick") -> list[Job]:
    return [job for job in stage.sidejob.jobs(limit=5000) if job.schedule == name]


def times(jobs: list[Job]) -> list[datetime]:
    return [job.nominal_time for job in jobs if job.nominal_time is not None]


# -- what is made ------------------------------------------------------------------------------------------------------


def test_each_time_is_made_once_with_its_number(stage: Stage) -> None:
    start = past(stage, 4.5 * 3600)
    schedule = stage.sidejob.schedule(
        "tick", stage.idle, every=3600, start=start, catch_up="all", queue="ticks", priority=7, state={"a": 1}
    )
    assert schedule.next_times(2) == [start, start + HOUR]
    assert sweep(stage) == 5
    jobs = made(stage)
    assert times(jobs) == [start + n * HOUR for n in range(5)]
    assert [job.schedule_number for job in jobs] == [1, 2, 3, 4, 5]
    assert {(job.queue, job.info["priority"], job.task) for job in jobs} == {("ticks", 7, "stage.idle")}
    assert jobs[0].info["schedule"] == "tick"
    other = stage.job()
    assert stage.sidejob.jobs(schedule="tick") == stage.sidejob.jobs(schedule=schedule, queue="ticks") == jobs
    assert stage.sidejob.jobs(schedule="tock") == []
    assert other not in list(stage.sidejob.iter_jobs(schedule="tick", page=2))
    assert (schedule.count, schedule.last, schedule.last_time) == (5, jobs[-1], start + 4 * HOUR)
    assert sweep(stage) == 0
    assert stage.drain() == 6
    assert stage.sidejob.stats()["counters"]["made_by_schedules"] == 5


def test_each_job_has_the_options_of_celery(stage: Stage) -> None:
    link = stage.app.signature("other", (1,), queue="q")
    stage.sidejob.schedule("tick", stage.idle, every=60, start=past(stage, 1), link=link, expires=30, time_limit=5)
    assert sweep(stage) == 1
    ((options,),) = stage.sql("SELECT options FROM askings")
    assert (options["expires"], options["time_limit"]) == ({"after_s": 30}, 5)
    assert [(each["task"], each["args"]) for each in options["link"]] == [("other", [1])]
    with pytest.raises(InvalidValueError, match="link is a signature"):
        stage.sidejob.schedule("tick", stage.idle, every=60, link="other")


def test_a_signature_says_what_is_called_and_how(stage: Stage) -> None:
    @stage.task(name="stage.adds")
    def adds(job: RunningJob, a: int, b: int, c: int = 0) -> None:
        pass

    signature = adds.s(2, c=3).set(queue="sums", priority=4)
    schedule = stage.sidejob.schedule("tick", signature, (1,), every=60, priority=5)
    assert (schedule.task, schedule.args, schedule.kwargs) == ("stage.adds", [1, 2], {"c": 3})
    assert schedule.options == {"queue": "sums", "priority": 5}
    with pytest.raises(InvalidValueError, match="a signature of one task, not"):
        stage.sidejob.schedule("tick", adds.s(1) | adds.s(2), every=60)


def test_without_a_start_the_first_time_is_an_interval_from_now(stage: Stage) -> None:
    before = store_time(stage)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=timedelta(hours=1))
    first, second = schedule.next_times(2)
    assert before <= first - timedelta(hours=1) <= store_time(stage)
    assert second - first == timedelta(hours=1)
    assert sweep(stage) == 0
    assert stage.sidejob.schedules() == [schedule] == [stage.sidejob.get_schedule("tick")]
    assert (schedule.last, schedule.count, schedule.paused) == (None, 0, False)


@pytest.mark.parametrize(("catch_up", "expected"), [("all", 8), ("last", 1), (3, 3), (100, 8)])
def test_no_more_is_caught_up_than_was_asked(stage: Stage, catch_up: Any, expected: int) -> None:
    start = past(stage, 7.3 * 3600)
    stage.sidejob.schedule("tick", stage.idle, every=3600, start=start, catch_up=catch_up)
    assert sweep(stage) == expected
    assert times(made(stage)) == [start + n * 3600 * SECOND for n in range(8)][-expected:]
    assert [job.schedule_number for job in made(stage)] == [*range(1, expected + 1)], "what is left out has no number"
    assert sweep(stage) == 0


def test_months_of_downtime_are_caught_up_in_small_transactions(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PAGE", 10)
    start = past(stage, 90 * 86400)
    end = store_time(stage)  # or further times come while the sweeper works
    stage.sidejob.schedule("last", stage.idle, every=1, start=start, end=end)
    stage.sidejob.schedule("few", stage.idle, cron="* * * * *", start=start, end=end, catch_up=25)
    stage.sidejob.schedule("all", stage.idle, every=86400, start=start, catch_up="all")
    assert sweep(stage) == 1 + 25 + 91
    transactions = stage.sql("SELECT schedule, count(*), count(DISTINCT xmin::text) FROM jobs GROUP BY 1 ORDER BY 1")
    assert transactions == [("all", 91, 10), ("few", 25, 3), ("last", 1, 1)]


@pytest.mark.few(1)
def test_sixteen_sweepers_make_a_thousand_times_once_each(stage: Stage) -> None:
    start = past(stage, 999.5)
    stage.sidejob.schedule("tick", stage.idle, every=1, start=start, end=start + 999 * SECOND, catch_up="all")
    with ThreadPoolExecutor(16) as pool:
        counts = [future.result() for future in [pool.submit(sweep, stage) for _ in range(16)]]
    jobs = made(stage)
    assert sum(counts) == len(jobs) == 1000
    assert sorted(times(jobs)) == [start + n * SECOND for n in range(1000)]
    assert sorted(number for job in jobs if (number := job.schedule_number)) == [*range(1, 1001)]
    assert stage.sidejob.get_schedule("tick").next_times(1) == [], "it has come to its end"


# -- accidents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["schedule:before-commit", "schedule:after-commit"])
def test_a_death_of_the_sweeper_loses_nothing_and_makes_nothing_twice(stage: Stage, at: Arm, point: str) -> None:
    def dies() -> None:
        raise Died(point)

    start = past(stage, 2.5)
    stage.sidejob.schedule("tick", stage.idle, every=1, start=start, end=start + 2 * SECOND, catch_up="all")
    at(point, dies)
    with pytest.raises(Died):
        sweep(stage)
    assert sweep(stage) == (3 if point == "schedule:before-commit" else 0)
    assert times(made(stage)) == [start, start + SECOND, start + 2 * SECOND]
    assert stage.drain() == 3


def test_a_lost_answer_to_the_commit_makes_nothing_twice(stage: Stage, at: Arm) -> None:
    start = past(stage, 2.5)
    stage.sidejob.schedule("tick", stage.idle, every=1, start=start, end=start + 2 * SECOND, catch_up="all")
    at("schedule:after-commit", lost)
    with pytest.raises(StoreUnavailableError):
        sweep(stage)
    sweep(stage)
    assert times(made(stage)) == [start, start + SECOND, start + 2 * SECOND]
    assert stage.drain() == 3


def test_the_clock_of_the_host_is_not_asked(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            raise AssertionError("the host was asked for the time")

        utcnow = today = now

    stage.sidejob.schedule("tick", stage.idle, every=3600)
    stage.sidejob.schedule("cron", stage.idle, cron="* * * * *", start=past(stage, 600), catch_up=2)
    for module in (model_schedule, scheduling, rows):
        if hasattr(module, "datetime"):
            monkeypatch.setattr(module, "datetime", Wrong)
    monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)
    assert sweep(stage) == 2
    assert stage.sidejob.get_schedule("tick").count == 0


def test_a_schedule_that_changes_while_it_is_due_loses_nothing(stage: Stage) -> None:
    start = past(stage, 3.5 * 3600)
    stage.sidejob.schedule("tick", stage.idle, every=3600, start=start, catch_up="all")
    before = store_time(stage)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=7200, catch_up="all", queue="new")
    assert sweep(stage) == 4
    assert times(made(stage)) == [start + n * HOUR for n in range(4)], "the old timing, until the change"
    assert {job.queue for job in made(stage)} == {"new"}, "made as it is declared now"
    assert before <= schedule.next_times(1)[0] - 2 * HOUR <= store_time(stage)
    assert schedule.count == 4


@pytest.mark.parametrize("change", ["a pause", "another timing"])
def test_a_clock_that_is_put_back_has_nothing_made_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The store's own: a standby whose clock is behind has become the primary."""
    start = past(stage, 10)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=1, start=start, catch_up="all")
    assert sweep(stage) >= 10
    right = rows.clock
    with monkeypatch.context() as patch:
        patch.setattr(rows, "clock", lambda executor: right(executor) - 6 * SECOND)
        if change == "a pause":
            schedule.pause()
            schedule.resume()
        else:
            stage.sidejob.schedule("tick", stage.idle, every=0.5, start=start, catch_up="all")
    sweep(stage)
    found = times(made(stage))
    assert len(found) == len(set(found))
    assert found == sorted(found)


def test_a_change_between_the_look_and_the_lock_has_nothing_made_of_the_old_one(stage: Stage) -> None:
    stage.sidejob.schedule("tick", stage.idle, every=1, start=past(stage, 3.5), catch_up="all")
    row = scheduling.get(stage.runtime, "tick")
    stage.sidejob.schedule("tick", stage.idle, every=1, start=row.spec.start_at, catch_up="last")
    assert scheduling.make_due(stage.runtime, row) == 0
    assert made(stage) == []
    stage.sidejob.get_schedule("tick").delete()
    assert scheduling.make_due(stage.runtime, row) == 0
    assert made(stage) == []


def test_declared_again_alike_nothing_changes(stage: Stage) -> None:
    stage.sidejob.schedule("tick", stage.idle, every=60, state={"a": [1]})
    first = scheduling.get(stage.runtime, "tick")
    stage.sidejob.schedule("tick", stage.idle.name, (), {}, every=timedelta(minutes=1), state={"a": (1,)})
    again = scheduling.get(stage.runtime, "tick")
    assert again.revision == first.revision
    assert again.plan == first.plan
    stage.sidejob.schedule("tick", stage.idle, every=60, state={"a": [2]})
    changed = scheduling.get(stage.runtime, "tick")
    assert changed.plan == first.plan, "the times stay where only the call changes"


def test_a_schedule_that_is_deleted_while_it_is_due_makes_nothing_more(stage: Stage) -> None:
    schedule = stage.sidejob.schedule("tick", stage.idle, every=1, start=past(stage, 3.5), catch_up="all")
    schedule.run_now()
    assert schedule.delete() is True
    assert schedule.delete() is False
    assert sweep(stage) == 0
    assert len(made(stage)) == 1, "what was made stays"
    with pytest.raises(ScheduleNotFoundError, match="There is no schedule 'tick'"):
        stage.sidejob.get_schedule("tick")
    assert stage.sidejob.schedules() == []


def test_a_task_that_the_sweeper_does_not_know_is_waited_for(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    start = past(stage, 2.5)

    @stage.task(name="stage.rare")
    def rare(job: RunningJob) -> None:
        pass

    schedule = stage.sidejob.schedule("tick", rare, every=1, start=start, end=start + 2 * SECOND, catch_up="all")
    stage.sidejob.schedule("other", stage.idle, every=1, start=start, end=start)
    task = dict.pop(stage.app.tasks, rare.name)
    sweeper = Sweeper(stage.runtime)
    report = sweeper.run_once()
    assert report is not None
    assert report.scheduled == 1, "the others have their turn"
    assert "No sidejob task 'stage.rare' is registered" in str(schedule.trouble)
    assert "Schedule tick is set aside" in caplog.text
    assert schedule.next_times(1) == [start]

    stage.app.tasks[task.name] = task
    assert sweep(stage) == 3, "nothing was lost"
    assert schedule.trouble is None


def test_trouble_with_what_a_schedule_was_is_not_noted_of_what_it_is(stage: Stage) -> None:
    schedule = stage.sidejob.schedule("tick", stage.idle, every=60)
    old = scheduling.get(stage.runtime, "tick").revision
    stage.sidejob.schedule("tick", stage.idle, every=30)
    rows.note_trouble(stage.runtime.connections, "tick", old, "too late")
    assert schedule.trouble is None


def test_a_task_without_its_code_here_is_made_as_a_worker_has_registered_it(stage: Stage) -> None:
    stage.sql(
        "INSERT INTO registry (task, queue, options) VALUES ('far.away', 'far', %s)",
        '{"inports": {"a": {"channels": []}}, "outports": {}}',
    )
    stage.sidejob.schedule("tick", "far.away", every=60, start=past(stage, 1))
    assert sweep(stage) == 1
    (job,) = made(stage)
    assert (job.queue, [port.name for port in job.inports]) == ("far", ["a"])


# -- overlap, pause ----------------------------------------------------------------------------------------------------


def test_a_time_whose_predecessor_is_open_is_skipped(stage: Stage) -> None:
    start = past(stage, 5.5 * 3600)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=3600, start=start, catch_up="all", overlap="skip")
    assert sweep(stage) == 1
    assert times(made(stage)) == [start]
    assert schedule.next_times(1)[0] > store_time(stage) - HOUR, "what was due meanwhile is passed over"
    assert schedule.count == 1
    stage.drain()
    assert [job.status for job in made(stage)] == ["completed"]


def test_a_time_whose_predecessor_is_open_waits_for_its_end(stage: Stage) -> None:
    start = past(stage, 2.5)
    stage.sidejob.schedule(
        "tick", stage.idle, every=1, start=start, end=start + 2 * SECOND, catch_up="all", overlap="wait"
    )
    for count in (1, 2, 3):
        assert sweep(stage) == 1
        assert sweep(stage) == 0
        assert len(made(stage)) == count
        assert stage.drain() == 1
    assert sweep(stage) == 0
    assert times(made(stage)) == [start, start + SECOND, start + 2 * SECOND]


def test_a_job_that_is_suspended_is_open_and_one_that_is_deleted_is_not(stage: Stage) -> None:
    @stage.task(name="stage.waits")
    def waits(job: RunningJob) -> None:
        job.suspend()

    start = past(stage, 1.5)
    schedule = stage.sidejob.schedule(
        "tick", waits, every=1, start=start, end=start + SECOND, catch_up="all", overlap="wait"
    )
    assert sweep(stage) == 1
    stage.drain()
    assert schedule.last.status == "suspended"
    assert sweep(stage) == 0
    stage.sql("DELETE FROM jobs")
    assert schedule.last is None
    assert sweep(stage) == 1


def test_what_passes_during_a_pause_is_never_made(stage: Stage) -> None:
    start = past(stage, 2.02)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=1, start=start, catch_up="all")
    schedule.pause("a holiday")
    assert (schedule.paused, schedule.pause_reason) == (True, "a holiday")
    assert schedule.next_times(10) == [start, start + SECOND, start + 2 * SECOND], "what was due waits"
    assert sweep(stage) == 0
    wait_until(lambda: store_time(stage) > start + 4 * SECOND, message="two times to pass")
    schedule.pause("a longer holiday")
    resumed_at = store_time(stage)
    schedule.resume()
    assert (schedule.paused, schedule.pause_reason) == (False, None)
    assert schedule.resume() == schedule, "once more does no harm"
    sweep(stage)
    found = times(made(stage))
    assert found[:3] == [start, start + SECOND, start + 2 * SECOND]
    assert all(time > resumed_at - SECOND for time in found[3:])
    assert {(time - start) % SECOND for time in found} == {timedelta(0)}, "the interval is still counted from its start"


def test_a_pause_outlives_a_change_and_hides_it_until_the_end(stage: Stage) -> None:
    schedule = stage.sidejob.schedule("tick", stage.idle, every=3600, start=past(stage, 0.5 * 3600)).pause()
    stage.sidejob.schedule("tick", stage.idle, cron="* * * * *")
    assert schedule.paused
    assert len(schedule.next_times(5)) == 1
    schedule.resume()
    assert [time.second for time in schedule.next_times(3)][1:] == [0, 0]


def test_run_now_makes_one_more_whatever_else_there_is(stage: Stage) -> None:
    schedule = stage.sidejob.schedule("tick", stage.idle, every=3600, overlap="skip", queue="ticks").pause()
    before = schedule.next_times(1)
    first, second = schedule.run_now(), schedule.run_now()
    assert [job.schedule_number for job in (first, second)] == [1, 2]
    assert first.queue == "ticks"
    assert abs(first.nominal_time - store_time(stage)) < 60 * SECOND
    assert (schedule.count, schedule.last, schedule.next_times(1)) == (2, second, before)

    def body(job: RunningJob) -> None:
        assert stage.sidejob.get_schedule("tick").run_now().schedule == "tick"
        stage.sidejob.schedule("made", stage.idle, every=60)

    stage.inside(body)
    assert schedule.count == 3
    assert stage.sidejob.get_schedule("made").count == 0


def test_many_run_a_schedule_at_once_and_each_gets_a_number_of_its_own(stage: Stage) -> None:
    schedule = stage.sidejob.schedule("tick", stage.idle, every=3600)
    with ThreadPoolExecutor(8) as pool:
        jobs = [future.result() for future in [pool.submit(schedule.run_now) for _ in range(24)]]
    assert sorted(job.schedule_number for job in jobs) == [*range(1, 25)]
    assert schedule.count == 24


def test_times_with_jitter_are_made_later(stage: Stage) -> None:
    start = past(stage, 50.5)
    stage.sidejob.schedule("tick", stage.idle, every=1, start=start, catch_up="all", jitter=1)
    made_count = sweep(stage)
    assert 50 <= made_count <= (store_time(stage) - start) // SECOND + 1
    row = scheduling.get(stage.runtime, "tick")
    assert row.next_at is not None
    assert row.due_at is not None
    assert row.next_at < row.due_at <= row.next_at + SECOND


def test_a_full_pool_is_waited_for(stage: Stage) -> None:
    pool = CapacityPool("narrow", 1)

    @stage.task(name="stage.narrow", capacity=pool)
    def narrow(job: RunningJob) -> None:
        pass

    start = past(stage, 2.5)
    stage.sidejob.schedule("tick", narrow, every=1, start=start, end=start + 2 * SECOND, catch_up="all")
    assert sweep(stage) == 3
    assert [job.waiting_for for job in made(stage)] == [[], ["pool"], ["pool"]]


# -- durable tasks -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shop(stage_database_url: str) -> Iterator[Stage]:
    """A stage with a durable task and an ordinary one."""
    made = Stage(stage_database_url)

    @made.app.task(name="mail", durable=True, shared=False)
    def mail(to: str, urgent: bool = False) -> None:
        pass

    @made.app.task(name="plain", shared=False)
    def plain() -> None:
        pass

    made.app.finalize()
    yield made
    made.sql(EMPTY)
    made.close()


def messages(shop: Stage) -> list[tuple[str, Any]]:
    found = shop.sql("SELECT queue, publication FROM messages ORDER BY due_at, task_id")
    return [(queue, json.loads(json.loads(publication)["about"])["headers"]) for queue, publication in found]


def test_of_a_durable_task_a_message_is_kept_for_each_time(shop: Stage) -> None:
    start = past(shop, 2.5)
    schedule = shop.sidejob.schedule(
        "tick", "mail", ("you",), {"urgent": True}, every=1, start=start, end=start + 2 * SECOND, catch_up="all",
        queue="mails", headers={"tenant": 7},
    )  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        assert sum(future.result() for future in [pool.submit(sweep, shop) for _ in range(4)]) == 3
    found = sorted((headers["sidejob_schedule_number"], headers) for _, headers in messages(shop))
    assert [headers["sidejob_nominal_time"] for _, headers in found] == [
        (start + n * SECOND).isoformat() for n in range(3)
    ]
    assert {(headers["task"], headers["sidejob_schedule"], headers["tenant"]) for _, headers in found} == {
        ("mail", "tick", 7)
    }
    assert {queue for queue, _ in messages(shop)} == {"mails"}
    assert schedule.last.id == found[-1][1]["id"]
    assert shop.sidejob.jobs() == []


def test_a_durable_task_is_waited_for_too(shop: Stage) -> None:
    start = past(shop, 2.5)
    schedule = shop.sidejob.schedule("tick", "mail", ("you",), every=1, start=start, catch_up="all", overlap="wait")
    assert (sweep(shop), sweep(shop)) == (1, 0)
    shop.sql("DELETE FROM messages")
    assert sweep(shop) == 1
    assert schedule.run_now().id == schedule.last.id


def test_a_durable_task_is_kept_with_the_schedules_commit_or_not_at_all(shop: Stage, at: Arm) -> None:
    def dies() -> None:
        raise Died

    start = past(shop, 0.5)
    shop.sidejob.schedule("tick", "mail", ("you",), every=1, start=start, end=start)
    at("schedule:before-commit", dies)
    with pytest.raises(Died):
        sweep(shop)
    assert messages(shop) == []
    at("schedule:after-commit", dies)
    with pytest.raises(Died):
        sweep(shop)
    assert len(messages(shop)) == 1
    assert sweep(shop) == 0


def test_a_call_that_its_task_would_refuse_is_refused_when_the_schedule_is_made(shop: Stage) -> None:
    refused: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (InvalidValueError, "'plain' is an ordinary task, whose calls are not kept", "plain", {}),
        (UnknownTaskError, "No sidejob task 'stage.cal' is registered.*Did you mean 'stage.call'", "stage.cal", {}),
        (TypeError, "required positional argument|missing", "mail", {}),
        (TypeError, "too many positional arguments", shop.idle, {"args": (1,)}),
        (TypeError, "'qeue' is no option of enqueue.*Did you mean 'queue'", shop.idle, {"qeue": "a"}),
        (InvalidValueError, "Did you mean 'countdown'|is no option", "mail", {"args": ("you",), "countdwn": 3}),
        (InvalidValueError, "priority is a number from 0 to 9", shop.idle, {"priority": 12}),
    ]
    for kind, text, task, options in refused:
        with pytest.raises(kind, match=text):
            shop.sidejob.schedule("tick", task, **{"every": 60, **options})
    assert shop.sidejob.schedules() == []


BAD: list[tuple[dict[str, Any], str]] = [
    ({"every": None}, "{} has no times: give every= or cron=."),
    ({"cron": "* * * * *"}, "{} has both every= and cron=: leave out every= or cron=."),
    (
        {"every": 0.01},
        "every of {} is a number of seconds, at least 0.1 and at most 10000000000, or a timedelta, not 0.01.",
    ),
    (
        {"every": "1m"},
        "every of {} is a number of seconds, at least 0.1 and at most 10000000000, or a timedelta, not '1m'.",
    ),
    ({"every": None, "cron": "61 * * * *"}, "cron of {} is no cron expression: '61 * * * *' (bad minute)."),
    ({"every": None, "cron": 5}, "cron of {} is an expression, such as '30 4 * * mon', not 5."),
    (
        {"timezone": "Mars", "every": None, "cron": "* * * * *"},
        "timezone of {} is the name of a time zone, such as 'Europe/Berlin', not 'Mars'.",
    ),
    ({"start": 5}, "start of {} is a datetime, not 5."),
    (
        {"start": datetime(2026, 1, 2, tzinfo=UTC), "end": datetime(2026, 1, 1, tzinfo=UTC)},
        "end of {} is before its start: 2026-01-01 00:00:00+00:00 is earlier than 2026-01-02 00:00:00+00:00.",
    ),
    ({"catchup": "all"}, "catchup is no option of {}: did you mean catch_up?"),
    ({"catch_up": 0}, "catch_up of {} is 'last', 'all', or a number of missed times from 1 to 10000, not 0."),
    ({"overlap": "skipp"}, "overlap of {} is 'allow', 'skip' or 'wait', not 'skipp'. Did you mean 'skip'?"),
    (
        {"jitter": 61},
        "jitter of {} is a number of seconds, at most 60 (a day, or the interval), or a timedelta, not 61.",
    ),
    ({"eta": datetime(2026, 1, 1, tzinfo=UTC)}, "eta is no option of {}: the schedule says when."),
    ({"aliases": ["a"]}, "aliases is no option of {}: an alias belongs to one job."),
    (
        {"unique": "k"},
        "unique is no option of {}: each time has a job of its own; overlap= says what an open one means.",
    ),
    ({"transaction": object()}, "transaction is no option of {}: the jobs are made later, by the sweeper."),
    (
        {"expires": datetime(2026, 1, 1, tzinfo=UTC)},
        "expires of {} is a number of seconds, counted from when each job is made.",
    ),
    ({"args": "a"}, "args of {} is a list or tuple of arguments, not 'a'."),
    ({"kwargs": [1]}, "kwargs of {} is a mapping, not [1]."),
    ({"state": {"a": object()}}, 'options of {}["state"]["a"]: a value of type object is not a JSON value'),
]


@pytest.mark.parametrize(("given", "text"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_declared_is_refused_with_an_error_of_ours(
    stage: Stage, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidValueError) as refusal:
        stage.sidejob.schedule("tick", stage.idle, **{"every": 60, **given})
    assert str(refusal.value) == text.format("schedule 'tick'")
    assert stage.sidejob.schedules() == []


def test_a_name_or_a_task_that_is_none_is_refused(stage: Stage) -> None:
    for name, text in ((5, "A schedule's name is a text, not 5."), ("", "A schedule's name is a text, not ''.")):
        with pytest.raises(InvalidValueError, match=text):
            stage.sidejob.schedule(name, stage.idle, every=60)
    with pytest.raises(InvalidValueError, match="task of schedule 'tick' is a task, its name, or a signature"):
        stage.sidejob.schedule("tick", None, every=60)
    with pytest.raises(ScheduleNotFoundError, match="There is no schedule 'tick'"):
        Schedule("tick", runtime=stage.runtime).pause()


# -- declared in the configuration -------------------------------------------------------------------------------------


def declared(stage: Stage, **schedules: dict[str, Any]) -> None:
    scheduling.apply_declared(stage.runtime, schedules)


def test_what_is_declared_is_made_changed_and_deleted_and_what_people_made_stays(stage: Stage) -> None:
    stage.sidejob.schedule("by hand", stage.idle, every=5)
    declared(stage, a={"task": stage.idle, "every": 60}, b={"task": "stage.idle", "cron": "0 6 * * *", "queue": "b"})
    a, b, _ = stage.sidejob.schedules()
    assert (a.name, a.every, a.declared) == ("a", timedelta(minutes=1), True)
    assert (b.cron, b.timezone, b.options) == ("0 6 * * *", "UTC", {"queue": "b"})
    before = scheduling.get(stage.runtime, "b").revision

    stage.sidejob.schedule("a", stage.idle, every=90)
    declared(stage, a={"task": stage.idle, "every": 60}, b={"task": "stage.idle", "cron": "0 6 * * *", "queue": "b"})
    assert a.every == timedelta(seconds=90), "what somebody set stays until the declaration changes"
    assert scheduling.get(stage.runtime, "b").revision == before
    declared(stage, a={"task": stage.idle, "every": 30})
    assert [schedule.name for schedule in stage.sidejob.schedules()] == ["a", "by hand"]
    assert a.every == timedelta(seconds=30)
    declared(stage)
    assert [schedule.name for schedule in stage.sidejob.schedules()] == ["by hand"]


def test_a_declaration_that_cannot_be_is_told_before_anything_changes(stage: Stage) -> None:
    with pytest.raises(InvalidValueError, match="every of schedule 'a' is a number of seconds"):
        declared(stage, a={"task": stage.idle, "every": -1})
    with pytest.raises(InvalidValueError, match="5 is no option of schedule 'a': it is not a text"):
        declared(stage, a={"task": stage.idle, "every": 1, 5: 6})  # type: ignore[dict-item]
    with pytest.raises(SettingsError, match=r"sidejob_schedules\['a'\] cannot be: 'qeue' is no option"):
        declared(stage, a={"task": stage.idle, "every": 1, "qeue": "q"})
    assert stage.sidejob.schedules() == []


def test_a_declaration_whose_task_nobody_knows_is_left_to_a_worker_that_does(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    declared(stage, a={"task": stage.idle, "every": 60})
    declared(stage, a={"task": "far.away", "every": 60}, b={"task": stage.idle, "every": 60})
    assert [(each.name, each.task) for each in stage.sidejob.schedules()] == [("a", "stage.idle"), ("b", "stage.idle")]
    assert "Schedule a of sidejob_schedules is left as it is in the store" in caplog.text


def test_a_schedule_that_is_declared_is_not_deleted_by_hand(stage_database_url: str) -> None:
    made = Stage(stage_database_url, sidejob_schedules={"tick": {"task": "stage.idle", "every": 60}})
    try:
        scheduling.apply_declared(made.runtime, made.sidejob.settings.schedules)
        with pytest.raises(InvalidValueError, match="Schedule 'tick' is declared in sidejob_schedules"):
            made.sidejob.get_schedule("tick").delete()
        assert made.sidejob.get_schedule("tick").exists
    finally:
        made.sql(EMPTY)
        made.close()


def test_a_store_without_schedules_is_asked_nothing_by_a_worker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat(stage.runtime)
    heartbeat.register()
    looks: list[str] = []
    monkeypatch.setattr(rows, "due", lambda *_, **__: looks.append("looked") or [])
    try:
        sweeper = Sweeper(stage.runtime, heartbeat)
        stage.sql("UPDATE leases SET holder = NULL")
        assert sweeper.run_once() is not None
        assert looks == []
        stage.sidejob.schedule("tick", stage.idle, every=3600)
        sweeper._renewed_at = float("-inf")
        assert sweeper.run_once() is not None
        assert looks == ["looked"]
    finally:
        heartbeat.leave()
        heartbeat.close()

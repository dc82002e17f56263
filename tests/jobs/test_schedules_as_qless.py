"""What the recurring jobs of qless do, with schedules."""

from __future__ import annotations

from datetime import timedelta

from celery_sidejob import RunningJob
from tests.jobs.test_schedules import SECOND, made, past, store_time, sweep, times
from tests.tools.in_process import Stage


def test_a_shorter_interval_makes_nothing_due_at_once(stage: Stage) -> None:
    """There the occurrence that was to come moves back by the difference, and several may be due."""
    stage.sidejob.schedule("tick", stage.idle, every=3600, start=past(stage, 1800), catch_up="all")
    assert sweep(stage) == 1
    before = store_time(stage)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=10, catch_up="all")
    assert sweep(stage) == 0
    assert schedule.next_times(1)[0] >= before + 10 * SECOND


def test_another_queue_keeps_the_times_and_the_number(stage: Stage) -> None:
    schedule = stage.sidejob.schedule("tick", stage.idle, every=3600, start=past(stage, 1))
    assert sweep(stage) == 1
    to_come = schedule.next_times(3)
    stage.sidejob.schedule("tick", stage.idle, every=3600, start=schedule.start, queue="other", priority=3)
    assert schedule.next_times(3) == to_come
    job = schedule.run_now()
    assert (job.queue, job.info["priority"], job.schedule_number) == ("other", 3, 2)
    assert (made(stage)[0].queue, schedule.count) == ("celery", 2), "what was made stays as it is"


def test_intervals_of_a_fraction_of_a_second_are_exact(stage: Stage) -> None:
    """There the times are floored at each check, and further jobs are made."""
    start = past(stage, 2.05)
    stage.sidejob.schedule("tick", stage.idle, every=0.3, start=start, end=start + 2 * SECOND, catch_up="all")
    assert sweep(stage) == 7
    assert times(made(stage)) == [start + n * timedelta(seconds=0.3) for n in range(7)]


def test_a_job_of_a_schedule_goes_before_those_of_lower_priority(stage: Stage) -> None:
    first = stage.job(priority=1)
    stage.sidejob.schedule("tick", stage.idle, every=3600, start=past(stage, 1), priority=5)
    assert sweep(stage) == 1
    assert stage.sidejob.queue("celery").peek() == [*made(stage), first]


def test_an_empty_list_stays_one(stage: Stage) -> None:
    @stage.task(name="stage.takes")
    def takes(job: RunningJob, given: list[int], also: dict[str, int]) -> None:
        pass

    stage.sidejob.schedule("tick", takes, ([],), {"also": {}}, every=3600, start=past(stage, 1))
    assert sweep(stage) == 1
    (job,) = made(stage)
    assert (job.args, job.kwargs) == ([[]], {"also": {}})


def test_a_schedule_that_begins_later_is_listed(stage: Stage) -> None:
    start = store_time(stage) + timedelta(days=400)
    schedule = stage.sidejob.schedule("tick", stage.idle, every=60, start=start)
    assert stage.sidejob.schedules() == [schedule]
    assert schedule.next_times(2) == [start, start + 60 * SECOND]


def test_other_jobs_are_never_overwritten(stage: Stage) -> None:
    """There a recurring job's child has a name that another job may have."""
    stage.job(aliases=["tick-1"])
    stage.sidejob.schedule("tick", stage.idle, every=1, start=past(stage, 1.5), catch_up="all")
    assert sweep(stage) == 2
    assert stage.sidejob.count_jobs()["queued"] == 3


def test_tags_are_those_of_later_jobs(stage: Stage) -> None:
    first = stage.sidejob.schedule("tick", stage.idle, every=3600, tags=["a"]).run_now()
    second = stage.sidejob.schedule("tick", stage.idle, every=3600, tags=["b", "c"]).run_now()
    assert ([*first.tags], sorted(second.tags)) == (["a"], ["b", "c"])
    assert stage.sidejob.jobs(tag="a") == [first]

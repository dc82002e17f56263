"""What the runs of a task in a queue have taken: counted by the processes that run them, and kept by day."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from celery_sidejob import InvalidValueError, Job, RunningJob, Statistics, StoreUnavailableError
from celery_sidejob.model.events import Measure
from celery_sidejob.model.statistics import Amount, Tally
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, recovery
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.stores import Store
from celery_sidejob.prometheus import exposition
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.store import measured
from celery_sidejob.testing.inline import run_until_quiet
from tests.jobs.test_schedules import past
from tests.tools.commands import ask
from tests.tools.counting import connections_of
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread

QUEUE = "mail"
TODAY = "(now() AT TIME ZONE 'UTC')::date"


def of(stage: Stage, **filters: Any) -> Statistics:
    connections_of(stage).record()
    return stage.sidejob.statistics(**filters)


def made_due(stage: Stage, job: Job, seconds_ago: float) -> None:
    stage.sql("UPDATE messages SET due_at = now() - make_interval(secs => %s) WHERE job_id = %s", seconds_ago, job.id)


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_a_run_waits_from_when_it_was_due(counted: Stage) -> None:
    jobs = [counted.job(queue=QUEUE) for _ in range(3)]
    for job, waited_s in zip(jobs, (10, 20, 60), strict=True):
        made_due(counted, job, waited_s)
        counted.run(job)
    found = of(counted, queue=QUEUE)
    assert found.waits.count == 3
    assert found.waits.mean == pytest.approx(30, abs=2)
    assert found.waits.std == pytest.approx(26.46, abs=2)
    assert {bound: count for bound, count in found.waits.histogram if count} == {30.0: 2, 300.0: 1}
    assert found.runs.count == 3
    assert 0 < found.runs.mean < 5


def test_a_run_that_was_delayed_has_not_waited_for_its_delay(counted: Stage) -> None:
    job = counted.job(queue=QUEUE, countdown=3600)
    counted.sql("UPDATE timers SET due_at = now() - interval '1 s' WHERE job_id = %s", job.id)
    counted.sql("UPDATE jobs SET created_at = now() - interval '1 h' WHERE id = %s", job.id)
    counted.sidejob.poll()
    counted.run(job)
    assert of(counted).waits.count == 1
    assert of(counted).waits.mean < 5


@pytest.mark.parametrize("kind", ["timer", "job", "task"])
def test_a_wait_counts_from_when_it_was_due_and_not_from_when_somebody_swept(counted: Stage, kind: str) -> None:
    if kind == "timer":
        counted.job(queue=QUEUE, countdown=3600)
        counted.sql("UPDATE timers SET due_at = now() - interval '31 s'")
    else:
        durable = counted.app.task(nothing, name="stage.durable", durable=True, shared=False)
        task = counted.idle if kind == "job" else durable
        counted.sidejob.schedule("tick", task, every=3600, start=past(counted, 31), catch_up="all", queue=QUEUE)
    counted.sidejob.poll()
    run_until_quiet(counted.sidejob)
    waits = of(counted, queue=QUEUE).waits
    assert (waits.count, waits.mean) == (1, pytest.approx(33, abs=3))


def nothing() -> None:
    """Do nothing."""


def fails(job: RunningJob) -> None:
    raise ValueError("no")


def test_failures_retries_and_losses(counted: Stage) -> None:
    def retries(job: RunningJob) -> None:
        if job.run_no == 1:
            raise job.retry(countdown=0)

    failing = counted.job(fails, queue=QUEUE)
    with pytest.raises(ValueError, match="no"):
        counted.run(failing)
    retried = counted.job(retries, queue=QUEUE)
    counted.run(retried)
    counted.run(retried)
    losing = counted.job(queue=QUEUE)
    hold = counted.claim(losing)
    assert hold is not None
    assert recovery.rescue(counted.runtime, losing.id, run_no=1, worker_id=counted.worker_id) is False
    counted.declare_dead(counted.worker_id)
    assert recovery.rescue(counted.runtime, losing.id, run_no=1, worker_id=counted.worker_id)
    found = of(counted, queue=QUEUE)
    assert (found.failures, found.retries, found.losses, found.failed_now) == (1, 1, 1, 1)
    assert found.runs.count == 3, "a run that was lost has no end of its own"
    assert found.waits.count == 4
    counted.sidejob.dead.purge(keep=0)
    assert (of(counted).failures, of(counted).failed_now) == (1, 0)


def does_nothing(job: RunningJob) -> None:
    pass


def test_a_job_that_loses_too_many_runs_has_failed(counted: Stage) -> None:
    job = counted.task(does_nothing, name="stage.lost_once", max_losses=1).enqueue(queue=QUEUE)
    assert counted.claim(job) is not None
    counted.declare_dead(counted.worker_id)
    assert recovery.rescue(counted.runtime, job.id, run_no=1, worker_id=counted.worker_id)
    found = of(counted)
    assert (found.failures, found.losses, found.failed_now) == (1, 1, 1)


def test_a_run_that_was_given_back_and_a_shutdown_are_not_counted(counted: Stage) -> None:
    job = counted.job(queue=QUEUE)
    assert counted.claim(job) is not None
    assert recovery.release(counted.runtime, job.id, run_no=1, worker_id=counted.worker_id)
    counted.run(job)
    job.terminate()
    counted.drain()
    assert job.refresh().status == "terminated"
    found = of(counted)
    assert (found.waits.count, found.runs.count, found.losses, found.failures) == (2, 1, 0, 0)


def test_the_wait_after_a_loss_begins_with_the_rescue(counted: Stage) -> None:
    """The lost run itself is no wait."""
    job = counted.job(queue=QUEUE)
    made_due(counted, job, 100)
    assert counted.claim(job) is not None
    counted.declare_dead(counted.worker_id)
    assert recovery.rescue(counted.runtime, job.id, run_no=1, worker_id=counted.worker_id)
    counted.worker_id = counted.new_worker()
    counted.run(job)
    found = of(counted)
    assert [count for bound, count in found.waits.histogram if bound == 300.0] == [1]
    assert found.waits.count == 2
    assert found.waits.sum_s < 110


@pytest.mark.parametrize("ends", ["quietly", "with a change"])
def test_an_end_whose_answer_is_lost_is_counted_at_most_once(counted: Stage, at: Arm, ends: str) -> None:
    job = counted.job((lambda job: None) if ends == "quietly" else (lambda job: job.state.update(a=1)), queue=QUEUE)
    hold = counted.claim(job)
    assert hold is not None
    at("end:after-commit", lost)
    counted.perform(hold)
    assert job.refresh().status == "completed"
    assert of(counted).runs.count <= 1
    assert of(counted).waits.count == 1


def test_tasks_and_queues_are_told_apart(counted: Stage) -> None:
    for queue, count in (("a", 1), ("b", 2)):
        for _ in range(count):
            counted.run(counted.job(queue=queue))
    counted.run(counted.job(lambda job: None, queue="b"))
    assert [of(counted, queue=queue).runs.count for queue in ("a", "b", "c")] == [1, 3, 0]
    assert of(counted, task="stage.idle").runs.count == of(counted, task=counted.idle).runs.count == 3
    assert of(counted, task=counted.call, queue="a").runs.count == 0
    assert of(counted).runs.count == 4
    assert (of(counted, queue="b").queue, of(counted, queue="b").task) == ("b", None)
    with pytest.raises(ValueError, match="no"):
        counted.inside(fails, queue="b")
    assert [of(counted, queue=queue).failed_now for queue in ("a", "b")] == [0, 1]
    assert [of(counted, task=task).failed_now for task in ("stage.idle", "stage.call")] == [0, 1]


def test_a_managed_queue_counts_the_job_that_began(counted: Stage) -> None:
    counted.sidejob.queue(QUEUE).configure(limit=5)
    job = counted.job(queue=QUEUE)
    made_due(counted, job, 40)
    counted.run(job)
    found = of(counted, queue=QUEUE, task="stage.idle")
    assert found.waits.mean == pytest.approx(40, abs=2)


# -- who counts, and where it is kept ----------------------------------------------------------------------------------


def test_nothing_is_counted_if_no_day_is_to_be_kept(counted: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted.runtime.observer, "_keeps_statistics", False)
    counted.run(counted.job(queue=QUEUE))
    connections_of(counted).record()
    assert counted.sql("SELECT count(*) FROM tallies") == [(0,)]


def test_a_store_that_is_away_loses_nothing(counted: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    counted.run(counted.job(queue=QUEUE))
    monkeypatch.setattr(measured, "add_tallies", _away)
    connections_of(counted).record()
    monkeypatch.undo()
    assert counted.sql("SELECT count(*) FROM tallies") == [(0,)]
    counted.run(counted.job(queue=QUEUE))
    assert of(counted).runs.count == 2


@pytest.mark.parametrize(("length", "counts"), [(500, 2), (3000, 1)])
def test_a_name_that_is_too_long_for_an_index_is_left_out(counted: Stage, length: int, counts: int) -> None:
    """It must not keep the counts of others from being stored."""
    letters = random.Random(1)
    name = "".join(chr(letters.randrange(0x20000, 0x2A000)) for _ in range(length))
    counted.run(counted.task(does_nothing, name=name).enqueue(queue=QUEUE))
    counted.run(counted.job(queue=QUEUE))
    found = of(counted)
    assert (found.runs.count, found.waits.count) == (counts, counts)


def _away(*_: Any) -> None:
    raise StoreUnavailableError("away")


def test_processes_that_store_at_once_are_added_up(stage: Stage) -> None:
    """They lock the rows in one order, whatever the order in which they have counted."""
    forward = {Tally("q", f"task {n}", Measure.RUN, n % 3): Amount(1, 5, 25) for n in range(30)}
    backward = dict(reversed(forward.items()))

    def add(amounts: dict[Tally, Amount]) -> None:
        for _ in range(20):
            stage.runtime.connections.transact(
                "record", lambda executor: measured.add_tallies(executor, amounts), single=True
            )

    with in_thread(lambda: add(forward)), in_thread(lambda: add(backward)):
        add(forward)
    found = stage.sidejob.statistics()
    assert (found.runs.count, found.runs.sum_s) == (1800, pytest.approx(1800 * 5e-6))


def test_a_day_has_its_own_numbers(stage: Stage) -> None:
    add_at(stage, days_ago=1, number=10)
    add_at(stage, days_ago=0, number=1)
    today, yesterday = ((datetime.now(UTC) - timedelta(days=ago)).date() for ago in (0, 1))
    assert stage.sidejob.statistics(day=today).runs.count == 1
    assert stage.sidejob.statistics(day="today").runs.count == 1
    assert stage.sidejob.statistics(day=yesterday.isoformat()).runs.count == 10
    assert stage.sidejob.statistics(day="yesterday").day == yesterday
    assert stage.sidejob.statistics().runs.count == 11
    assert stage.sidejob.statistics(day="2020-01-01").runs.count == 0


def add_at(stage: Stage, *, days_ago: int, number: int) -> None:
    """Have so many runs counted on an earlier day."""
    amounts = {Tally(QUEUE, "stage.idle", Measure.RUN, 3): Amount(number, number, number)}
    stage.runtime.connections.transact("record", lambda executor: measured.add_tallies(executor, amounts), single=True)
    stage.sql(f"UPDATE tallies SET day = {TODAY} - %s WHERE day = {TODAY}", days_ago)


@pytest.mark.parametrize("kept", [0, 1, 30])
def test_days_that_are_not_kept_are_forgotten_and_totals_stay(stage: Stage, kept: int) -> None:
    for ago in (40, 31, 30, 29, 1, 0):
        add_at(stage, days_ago=ago, number=1)
    store = Store(replace(stage.runtime.settings, stats_history=kept), stage.runtime.connections)
    Prune(Sweep(stage.runtime.at(store))).run_once()
    left = [ago for (ago,) in stage.sql(f"SELECT {TODAY} - day FROM tallies WHERE day > '1970-01-01' ORDER BY day")]
    assert left == {0: [], 1: [0], 30: [29, 1, 0]}[kept]
    assert monitored(stage)["sidejob_task_run_seconds_count"] == {(QUEUE, "stage.idle"): 6}


# -- where people see it -----------------------------------------------------------------------------------------------


def monitored(stage: Stage) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(exposition(stage.sidejob)):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in ("queue", "task", "le") if name in sample.labels)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_prometheus_reads_histograms(counted: Stage) -> None:
    for waited_s in (0, 20):
        job = counted.job(queue=QUEUE)
        made_due(counted, job, waited_s)
        counted.run(job)
    connections_of(counted).record()
    found = monitored(counted)
    buckets = found["sidejob_task_wait_seconds_bucket"]
    assert [buckets[QUEUE, "stage.idle", bound] for bound in ("10", "30", "+Inf")] == [1, 2, 2]
    assert found["sidejob_task_wait_seconds_sum"][QUEUE, "stage.idle"] == pytest.approx(20, abs=2)
    assert found["sidejob_task_failures_total"] == {(QUEUE, "stage.idle"): 0}


def test_the_command_shows_a_day(counted: Stage) -> None:
    job = counted.job(queue=QUEUE)
    made_due(counted, job, 90)
    counted.run(job)
    connections_of(counted).record()
    (shown,) = ask(counted.app, "stats", "--day", "today", "--json").document["tasks"]
    assert (shown["queue"], shown["task"], shown["runs"]["count"], shown["failed_now"]) == (QUEUE, "stage.idle", 1, 0)
    assert [300.0, 1] in shown["waits"]["histogram"]
    lines = ask(counted.app, "stats", "--day", "all").lines
    (line,) = [line for line in lines if "stage.idle" in line]
    assert lines[-1].startswith("± is the standard deviation: how far single runs usually are from the mean")
    assert " 90.0 s " in line or " 91.0 s " in line or "90." in line
    assert ask(counted.app, "stats", "--day", "2020-01-01").lines == ["Nothing is known of runs then."]
    refused = ask(counted.app, "stats", "--day", "monday").err
    assert "--day takes a date such as 2026-11-26, today, yesterday or all, not 'monday'." in refused


@pytest.mark.parametrize("filters", [{"day": "monday"}, {"queue": 5}, {"task": b"x"}])
def test_filters_that_cannot_be_are_refused(stage: Stage, filters: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError):
        stage.sidejob.statistics(**filters)


def test_an_end_from_outside_has_no_duration(counted: Stage) -> None:
    """The worker ends a run whose process it has stopped, and does not know since when that ran."""
    job = counted.job(queue=QUEUE)
    hold = counted.claim(job)
    assert hold is not None
    hold.began_at = None
    endings.end(counted.runtime, hold, None, Ending(RunEnd.FAILED, error='{"type": "T", "message": ""}'),
                from_outside=True)  # fmt: skip
    found = of(counted)
    assert (found.runs.count, found.failures) == (0, 1)

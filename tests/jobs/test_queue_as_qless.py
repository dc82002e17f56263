"""What queues of qless do, or do wrong, where no other test tells how it is here; by the QL and B-Q numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from celery_sidejob import InvalidValueError, Job, JobNotFoundError, RunningJob
from celery_sidejob.operations import waiting
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import runs
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.store.outbox.kinds import JOBS
from tests.tools.in_process import Stage

QUEUE = "mail"


def take(stage: Stage, named: Job) -> Hold | None:
    """Use the message of a job as the permit that it is."""
    hold = runs.claim(
        stage.runtime, named.id, task=named.task, for_run=1, worker_id=stage.worker_id, queue=QUEUE,
        tasks=lambda: (stage.idle.name, stage.call.name),
    )  # fmt: skip
    if hold is not None:
        stage.holds[hold.job_id] = hold
    return hold


def taken(stage: Stage, named: Job) -> int | None:
    hold = take(stage, named)
    return None if hold is None else hold.job_id


def counts(stage: Stage) -> tuple[int, ...]:
    found = stage.sidejob.queue(QUEUE).counts
    return found.waiting, found.running, found.scheduled, found.blocked, found.lost


def retry(job: RunningJob) -> None:
    raise job.retry(countdown=3600)


# -- counts and reads --------------------------------------------------------------------------------------------------


@pytest.fixture
def full(stage: Stage) -> Stage:
    """A queue with one job in each state but two that wait, and a job of another queue."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    lost, running = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    assert taken(stage, lost) == lost.id
    stage.declare_dead(stage.worker_id)
    stage.worker_id = stage.new_worker()
    assert taken(stage, running) == running.id
    again = stage.job(retry, queue=QUEUE)
    hold = take(stage, again)
    assert hold is not None
    stage.perform(hold)
    parked = stage.job(queue=QUEUE)
    waiting.decline(stage.runtime, JOBS, (parked.id, 1), task=parked.task)
    assert parked.waiting_for == ["no worker"]
    stage.job(queue=QUEUE, countdown=3600)
    for _ in range(2):
        stage.job(queue=QUEUE)
    stage.job(queue="another")
    stage.runtime.connections.write_behind_now()
    return stage


def test_each_job_of_a_queue_is_counted_by_what_it_waits_for(full: Stage) -> None:
    """QL-190: what waits, runs, is scheduled (a retry, a timer), is blocked, and is lost."""
    assert counts(full) == (2, 1, 2, 1, 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda stage: stage.sidejob.queue(QUEUE).counts,
        lambda stage: stage.sidejob.queue(QUEUE).peek(),
        lambda stage: stage.sidejob.queues(),
        lambda stage: stage.sidejob.jobs(queue=QUEUE),
        lambda stage: stage.sidejob.stats(),
    ],
    ids=["counts", "peek", "queues", "jobs", "stats"],
)
@pytest.mark.parametrize("is_paused", [False, True], ids=["open", "paused"])
def test_to_look_into_a_queue_changes_nothing(full: Stage, read: Callable[[Stage], Any], is_paused: bool) -> None:
    """QL-060, QL-191, QL-193, B-Q30: also if timers and retries are due, which a sweep has still to fire."""
    full.sql("UPDATE timers SET due_at = now() - interval '1 s'")
    if is_paused:
        full.sidejob.queue(QUEUE).pause()
    before = full.everything()
    read(full)
    assert full.everything() == before


def test_a_timer_that_is_due_is_scheduled_until_it_has_fired(full: Stage) -> None:
    """QL-191: nothing is moved to make a number right."""
    full.sql("UPDATE timers SET due_at = now() - interval '1 s'")
    assert counts(full) == (2, 1, 2, 1, 1)
    full.sidejob.poll()
    waiting, _, scheduled, _, _ = counts(full)
    assert (waiting, scheduled) == (4, 1), "the timer, and the run that was lost"


def test_what_is_shown_next_waits_and_does_not_run(full: Stage) -> None:
    """QL-060: neither what runs, nor what is lost, scheduled or blocked."""
    first, second = full.sidejob.queue(QUEUE).peek()
    assert [first.status, second.status] == ["queued", "queued"]
    assert (first.waiting_for, second.waiting_for) == ([], [])
    assert first.id < second.id


def test_as_many_are_shown_as_were_asked_for(full: Stage) -> None:
    """QL-061: none if none were; a negative number is refused."""
    queue = full.sidejob.queue(QUEUE)
    assert [len(queue.peek(limit)) for limit in (0, 1, 2, 3)] == [0, 1, 2, 2]
    for wrong in (-1, True, 1.5, "2", None):
        with pytest.raises(InvalidValueError, match="limit is a number of jobs"):
            queue.peek(wrong)  # type: ignore[arg-type]


def test_a_queue_is_listed_while_it_is_managed_or_has_something(stage: Stage) -> None:
    """QL-046, QL-197: the names are those of rows; none has to be forgotten."""
    stage.sidejob.queue("b").pause()
    stage.sidejob.queue("a").configure(limit=1)
    job = stage.job(queue=QUEUE)
    assert [queue.name for queue in stage.sidejob.queues()] == ["a", "b"]
    assert sorted(stage.sidejob.stats()["queues"]) == ["a", "b", QUEUE]
    stage.run(job)
    stage.runtime.connections.write_behind_now()
    assert sorted(stage.sidejob.stats()["queues"]) == ["a", "b"]


def test_an_empty_queue_counts_nothing_and_shows_nothing(stage: Stage) -> None:
    """QL-050."""
    queue = stage.sidejob.queue("nobody's")
    assert (queue.managed, queue.paused, queue.peek()) == (False, False, [])
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    only = stage.job(queue=QUEUE)
    assert [taken(stage, only), taken(stage, only)] == [only.id, None]
    assert counts(stage) == (0, 1, 0, 0, 0)


# -- order -------------------------------------------------------------------------------------------------------------


def test_of_one_priority_the_job_that_is_due_first_goes_first(stage: Stage) -> None:
    """QL-052: and not the one with the larger id; QL-033: one that comes due later stands behind."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    later = stage.job(queue=QUEUE, countdown=3600)
    first, second = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    stage.sql("UPDATE timers SET due_at = now()")
    stage.sidejob.poll()
    assert [taken(stage, second) for _ in range(4)] == [first.id, second.id, later.id, None]


def test_jobs_of_one_transaction_are_served_as_they_were_made(stage: Stage) -> None:
    """QL-052, B-Q19: their times are equal to the last digit, and the order is not that of a text."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    jobs = stage.sidejob.enqueue_many([{"task": stage.idle, "queue": QUEUE, "priority": 9}] * 12)
    assert stage.sql("SELECT count(DISTINCT due_at) FROM messages") == [(1,)]
    assert stage.sidejob.queue(QUEUE).peek() == jobs
    assert [taken(stage, jobs[-1]) for _ in jobs] == [job.id for job in jobs]


def test_a_priority_that_stays_as_it_is_keeps_the_place(stage: Stage) -> None:
    """QL-224, B-Q20: also that of a lower priority, given again."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    first, second, third = (stage.job(queue=QUEUE, priority=5) for _ in range(3))
    third.set_priority(5)
    second.set_priority(9).set_priority(5)
    assert stage.sidejob.queue(QUEUE).peek() == [first, second, third]
    assert second.info["priority"] == 5


@pytest.mark.parametrize("wrong", ["high", None, -1, 10, 1.5, True])
def test_a_priority_that_is_none_is_refused(stage: Stage, wrong: Any) -> None:
    """QL-031, QL-224: and the job is as it was."""
    job = stage.job(queue=QUEUE, priority=5)
    with pytest.raises(InvalidValueError, match="priority is a number from 0 to 9"):
        job.set_priority(wrong)
    assert job.refresh().info["priority"] == 5


def test_a_job_that_is_gone_gets_no_priority(stage: Stage) -> None:
    """QL-224."""
    job = stage.job(queue=QUEUE)
    job.terminate()
    stage.run(job)
    assert job.delete()
    with pytest.raises(JobNotFoundError):
        job.set_priority(3)


def test_a_finished_job_that_is_asked_again_is_not_removed(stage: Stage) -> None:
    """QL-045: and it is served like any other, until it rests once more."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)

    def forgettable(job: RunningJob) -> None:
        pass

    job = stage.task(forgettable, name="qless.forgettable", retention=0).enqueue(queue=QUEUE)
    stage.drain()
    assert job.refresh().status == "completed"
    job.run()
    pruner = Prune(Sweep(stage.runtime))
    assert pruner.run_once()["pruned_jobs"] == 0
    assert stage.sidejob.queue(QUEUE).peek() == [job]
    stage.drain()
    assert pruner.run_once()["pruned_jobs"] == 1
    assert not job.exists


# -- limits and mistakes -----------------------------------------------------------------------------------------------


def fails(job: RunningJob) -> None:
    raise ValueError("no")


@pytest.mark.parametrize("body", [lambda job: None, fails, retry, lambda job: job.suspend()],
                         ids=["completed", "failed", "retried", "suspended"])  # fmt: skip
def test_each_end_of_a_run_frees_its_place(stage: Stage, body: Callable[[RunningJob], Any]) -> None:
    """QL-057."""
    stage.sidejob.queue(QUEUE).configure(limit=1)
    first, second = stage.job(body, queue=QUEUE), stage.job(queue=QUEUE)
    hold = take(stage, first)
    assert hold is not None
    assert taken(stage, second) is None
    stage.perform(hold)
    assert (first.id in stage.raised) == (body is fails)
    assert taken(stage, second) == second.id


def test_a_run_that_was_lost_has_its_place_until_it_is_rescued(stage: Stage) -> None:
    """QL-057, B-Q4: at limit 1 nobody begins beside a run that may still be in progress."""
    queue = stage.sidejob.queue(QUEUE).configure(limit=1)
    first, second = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    assert taken(stage, first) == first.id
    stage.sql("UPDATE workers SET beat_at = now() - interval '1 h'")
    assert (taken(stage, second), queue.counts.running) == (None, 1), "silent, and not declared dead"
    stage.declare_dead(stage.worker_id)
    stage.worker_id = stage.new_worker()
    assert (taken(stage, second), counts(stage)) == (None, (1, 0, 0, 0, 1))
    stage.sidejob.poll()
    assert counts(stage) == (2, 0, 0, 0, 0)
    assert taken(stage, second) is not None


def test_a_lost_run_is_taken_back_though_nobody_asks_for_work(stage: Stage) -> None:
    """B-Q2: neither a permit nor a worker of the queue is needed."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    job = stage.job(queue=QUEUE)
    assert taken(stage, job) == job.id
    stage.declare_dead(stage.worker_id)
    assert stage.sidejob.poll().rescued == 1
    assert (job.refresh().status, job.info["losses"], counts(stage)) == ("queued", 1, (1, 0, 0, 0, 0))


def test_a_job_that_is_deleted_leaves_nothing_that_stops_its_queue(stage: Stage) -> None:
    """B-Q13: also the message that a worker has fetched by then."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    gone, stays = stage.job(queue=QUEUE, priority=9), stage.job(queue=QUEUE)
    gone.terminate(without_shutdown=True)
    assert gone.delete()
    assert stage.sidejob.queue(QUEUE).peek() == [stays]
    claim = partial(
        runs.claim, stage.runtime, gone.id, task=stage.idle.name, for_run=1, worker_id=stage.worker_id, queue=QUEUE,
        tasks=lambda: (stage.idle.name,),
    )  # fmt: skip
    hold = claim()
    assert hold is not None
    assert hold.job_id == stays.id, "the permit is good for another"
    assert claim() is None


def test_a_job_that_somebody_has_locked_stops_no_other(stage: Stage) -> None:
    """B-Q13: it is passed over, and is the best again afterwards."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    best, other = stage.job(queue=QUEUE, priority=9), stage.job(queue=QUEUE)
    third = stage.job(queue=QUEUE)
    with stage.connect() as somebody:
        somebody.execute("BEGIN")
        somebody.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [best.id])
        assert taken(stage, best) == other.id
        somebody.execute("ROLLBACK")
    assert taken(stage, third) == best.id


def test_a_permit_begins_one_run_and_no_more(stage: Stage) -> None:
    """QL-053, B-Q26: a claim that fails has begun nothing, however many wait."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    jobs = stage.sidejob.enqueue_many([{"task": stage.idle, "queue": QUEUE}] * 50)
    assert taken(stage, jobs[0]) == jobs[0].id
    assert counts(stage) == (49, 1, 0, 0, 0)


# -- retries and moves -------------------------------------------------------------------------------------------------


def test_a_retry_stays_in_its_queue(stage: Stage) -> None:
    """QL-097, B-Q12: there is no way to name another."""

    def elsewhere(job: RunningJob) -> None:
        raise job.retry(countdown=0, queue="elsewhere")  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="queue"):
        stage.inside(elsewhere, queue=QUEUE)
    job = stage.job(retry, queue=QUEUE)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert stage.sql("SELECT queue FROM messages WHERE job_id = %s", job.id) == [(QUEUE,)]
    assert job.refresh().queue == QUEUE


@pytest.mark.parametrize("countdown", ["soon", float("nan")])
def test_a_retry_with_a_delay_that_cannot_be_is_an_error_of_the_body(stage: Stage, countdown: Any) -> None:
    def bad(job: RunningJob) -> None:
        raise job.retry(countdown=countdown)

    with pytest.raises(InvalidValueError):
        stage.inside(bad, queue=QUEUE)


def test_no_retry_is_a_number_of_retries(stage: Stage) -> None:
    """QL-303: nothing turns a zero into the default."""
    never = stage.task(retry, name="stage.never_again", max_retries=0).enqueue(queue=QUEUE)
    hold = stage.claim(never)
    assert hold is not None
    stage.perform(hold)
    assert never.refresh().status == "failed"


def test_a_move_keeps_what_it_is_not_given(stage: Stage) -> None:
    """QL-040, B-Q34."""
    job = stage.job(queue=QUEUE, priority=7, tags=["big"], created_by="import")
    job.move(queue="other")
    found = job.refresh().info
    assert (job.queue, found["priority"], found["created_by"], job.tags) == ("other", 7, "import", ["big"])

"""Managed queues: what is begun there, in which order, and how many at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
from celery.app.task import Context

from celery_sidejob import CapacityPool, InvalidValueError, Job, RunningJob
from celery_sidejob.hooks.jobs.run import like
from celery_sidejob.model.crash_points import Died
from celery_sidejob.model.status import Gate
from celery_sidejob.operations.gates import queues
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import runs
from celery_sidejob.store.outbox import publishing
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.outbox.publishing import mark_published
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.pooled_too

QUEUE = "mail"
TO_PUBLISH = "SELECT job_id FROM messages WHERE next_check_at <= now() AND locked_by IS NULL"


def take(stage: Stage, named: Job) -> Hold | None:
    """Use the message of a job as the permit that it is."""
    tasks = (stage.idle.name, stage.call.name)
    hold = runs.claim(
        stage.runtime, named.id, task=named.task, for_run=1, worker_id=stage.worker_id, queue=QUEUE,
        tasks=lambda: tasks,
    )  # fmt: skip
    if hold is not None:
        stage.holds[hold.job_id] = hold
    return hold


def taken(stage: Stage, named: Job) -> int | None:
    hold = take(stage, named)
    return None if hold is None else hold.job_id


def at_gate(stage: Stage) -> int:
    return int(stage.sql(f"SELECT count(*) FROM messages WHERE gate = {Gate.QUEUE}")[0][0])


@contextmanager
def another_waits(stage: Stage, at: Arm, point: str, call: Callable[[], Any]) -> Iterator[None]:
    """Have another thread make a call when the block reaches a point of its transaction, for whose end it waits."""
    waited: list[str] = []
    with ExitStack() as others:

        def comes() -> None:
            others.enter_context(in_thread(call))
            stage.wait_for_waiters()
            waited.append(point)

        at(point, comes)
        yield
    assert waited == [point]


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_permit_begins_the_best_job_whatever_it_names(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    low, high, also_high = (stage.job(queue=QUEUE, priority=priority) for priority in (1, 7, 7))
    assert [taken(stage, low) for _ in range(4)] == [high.id, also_high.id, low.id, None]


@pytest.mark.few(1)
def test_a_thousand_jobs_of_one_moment_are_served_exactly_by_priority(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    chosen = random.Random(7)
    items = [{"task": stage.idle, "queue": QUEUE, "priority": chosen.randrange(10)} for _ in range(1000)]
    jobs = stage.sidejob.enqueue_many(items)
    priorities = {job.id: item["priority"] for job, item in zip(jobs, items, strict=True)}
    best_first = sorted(priorities, key=lambda job_id: (-priorities[job_id], job_id))
    assert [job.id for job in stage.sidejob.queue(QUEUE).peek(1000)] == best_first
    assert [taken(stage, jobs[0]) for _ in jobs] == best_first


def test_a_job_is_overtaken_after_it_was_published(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    first, second, third = (stage.job(queue=QUEUE, priority=5) for _ in range(3))
    third.set_priority(6)
    second.set_priority(5)
    assert [job.id for job in stage.sidejob.queue(QUEUE).peek()] == [third.id, first.id, second.id]
    assert [taken(stage, first) for _ in range(3)] == [third.id, first.id, second.id]


def test_a_backoff_of_a_high_priority_holds_nobody_up(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    high, low = stage.job(queue=QUEUE, priority=9), stage.job(queue=QUEUE, priority=0)
    stage.sql("UPDATE messages SET due_at = now() + interval '1 hour' WHERE job_id = %s", high.id)
    assert taken(stage, high) == low.id
    assert taken(stage, high) is None


def test_what_waited_before_the_queue_was_managed_is_ranked(stage: Stage) -> None:
    low, high = stage.job(queue=QUEUE, priority=1), stage.job(queue=QUEUE, priority=2)
    assert [job.id for job in stage.sidejob.queue(QUEUE).peek()] == [high.id, low.id]
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    assert [taken(stage, low) for _ in range(2)] == [high.id, low.id]


def make_managed(stage: Stage, how: str) -> None:
    queue = stage.sidejob.queue(QUEUE)
    if how == "paused":
        queue.pause()
    elif how == "configured":
        queue.configure(limit=1)
    else:
        queues.apply_declared(stage.runtime, {QUEUE: {"ordered": True}})


@pytest.mark.parametrize("how", ["paused", "configured", "declared"])
@pytest.mark.parametrize("dies", [False, True])
def test_what_waits_is_ranked_whatever_makes_its_queue_managed(stage: Stage, at: Arm, how: str, dies: bool) -> None:
    """Also if the process dies before that."""

    def die() -> None:
        raise Died

    jobs = [stage.job(queue=QUEUE, priority=priority) for priority in (1, 2, 3, 0)]
    if dies:
        at("rank:before-commit", die)
    with pytest.raises(Died) if dies else nullcontext():
        make_managed(stage, how)
    assert stage.sql("SELECT count(rank) FROM messages") == [(0 if dies else len(jobs),)]
    queue = stage.sidejob.queue(QUEUE)
    jobs[3].set_priority(9)
    new = stage.job(queue=QUEUE, priority=2)
    order = [jobs[3], jobs[2], jobs[1], new, jobs[0]]
    assert queue.peek() == order
    if dies and how != "paused":
        stage.sidejob.poll()
    queue.resume()
    queue.configure(limit=None)
    assert queue.peek() == order
    assert [taken(stage, jobs[0]) for _ in order] == [job.id for job in order]


def test_a_message_that_is_locked_while_its_queue_is_ranked_is_ranked_by_the_sweeper(stage: Stage) -> None:
    jobs = [stage.job(queue=QUEUE, priority=priority) for priority in (1, 2)]
    with stage.connect(autocommit=False) as client:
        client.execute("SELECT FROM messages WHERE job_id = %s FOR UPDATE", [jobs[1].id])
        stage.sidejob.queue(QUEUE).pause()
    assert stage.sql("SELECT rank FROM messages ORDER BY job_id") == [(1,), (None,)]
    stage.sidejob.poll()
    assert stage.sql("SELECT rank FROM messages ORDER BY job_id") == [(1,), (2,)]


def test_a_job_that_was_armed_just_before_its_queue_was_managed_is_served_by_its_name(stage: Stage) -> None:
    with stage.connect(autocommit=False) as client:
        job = stage.job(queue=QUEUE, priority=3, transaction=client)
        stage.sidejob.queue(QUEUE).pause()
    assert stage.sql("SELECT rank FROM messages") == [(None,)]
    assert taken(stage, job) is None
    assert stage.sql("SELECT rank FROM messages") == [(3,)], "at the gate it waits like all others"
    stage.sidejob.queue(QUEUE).resume()
    assert taken(stage, job) == job.id


def test_a_job_of_another_task_with_other_time_limits_is_left_to_its_own_message(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    other = stage.task(does_nothing, name="stage.other")
    first = stage.sidejob.enqueue(other, queue=QUEUE, priority=9)
    second = stage.job(queue=QUEUE)
    limited = stage.job(queue=QUEUE, priority=8, soft_time_limit=5)
    assert taken(stage, second) == second.id
    assert taken(stage, first) == first.id
    assert taken(stage, limited) == limited.id


def does_nothing(job: object) -> None:
    """Do nothing."""


def test_a_claim_by_name_takes_nothing_of_a_managed_queue(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).pause()
    job = stage.job(queue=QUEUE)
    assert stage.claim(job) is None
    elsewhere = stage.job()
    assert stage.claim(elsewhere) is not None


# -- pause -------------------------------------------------------------------------------------------------------------


def test_nothing_begins_in_a_paused_queue_and_everything_does_afterwards(stage: Stage) -> None:
    queue = stage.sidejob.queue(QUEUE)
    jobs = [stage.job(queue=QUEUE) for _ in range(3)]
    queue.pause("the server is down")
    assert (queue.paused, queue.pause_reason) == (True, "the server is down")
    assert [taken(stage, job) for job in jobs] == [None] * 3
    assert at_gate(stage) == 3
    assert jobs[0].waiting_for == ["pause"]
    assert queue.counts.waiting == 3
    queue.resume()
    assert (queue.paused, queue.pause_reason, at_gate(stage)) == (False, None, 0)
    assert sorted(filter(None, (taken(stage, job) for job in jobs))) == [job.id for job in jobs]


def test_a_permit_for_a_job_that_already_runs_leaves_another_at_the_gate(stage: Stage) -> None:
    """The job that runs has used the permit of that other one."""
    queue = stage.sidejob.queue(QUEUE).configure(ordered=True)
    low, high = stage.job(queue=QUEUE, priority=1), stage.job(queue=QUEUE, priority=2)
    assert taken(stage, low) == high.id
    queue.pause()
    assert taken(stage, high) is None
    assert at_gate(stage) == 1
    queue.resume()
    assert taken(stage, high) == low.id


# -- limits ------------------------------------------------------------------------------------------------------------


def test_no_more_run_than_the_limit(stage: Stage) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(limit=2)
    jobs = [stage.job(queue=QUEUE) for _ in range(4)]
    assert [taken(stage, job) for job in jobs] == [jobs[0].id, jobs[1].id, None, None]
    assert jobs[2].waiting_for == ["limit"]
    assert (queue.counts.running, queue.counts.waiting, at_gate(stage)) == (2, 2, 2)
    stage.perform(stage.holds[jobs[0].id])
    assert at_gate(stage) == 1, "the end has let one in"
    assert taken(stage, jobs[2]) == jobs[2].id
    assert taken(stage, jobs[3]) is None


def test_a_limit_is_right_at_once_after_a_death(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(limit=1)
    jobs = [stage.job(queue=QUEUE) for _ in range(2)]
    assert taken(stage, jobs[0]) == jobs[0].id
    stage.declare_dead(stage.worker_id)
    stage.worker_id = stage.new_worker()
    assert taken(stage, jobs[1]) is None
    stage.sidejob.poll()
    assert stage.sql("SELECT count(*) FROM messages WHERE locked_by IS NOT NULL") == [(0,)]
    assert take(stage, jobs[1]) is not None
    assert take(stage, jobs[0]) is None


def test_a_higher_limit_lets_in_at_once_and_a_lower_one_stops_nothing(stage: Stage) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(limit=1)
    jobs = [stage.job(queue=QUEUE) for _ in range(3)]
    assert [taken(stage, job) for job in jobs] == [jobs[0].id, None, None]
    queue.configure(limit=3)
    assert at_gate(stage) == 0
    assert [taken(stage, job) for job in jobs[1:]] == [jobs[1].id, jobs[2].id]
    queue.configure(limit=1)
    assert queue.counts.running == 3


@pytest.mark.parametrize("limit", [1, 3])
def test_claims_at_once_never_exceed_the_limit(stage: Stage, limit: int) -> None:
    stage.sidejob.queue(QUEUE).configure(limit=limit)
    jobs = [stage.job(queue=QUEUE) for _ in range(12)]
    found: list[int | None] = []
    threads = [in_thread(lambda job=job: found.append(taken(stage, job))) for job in jobs]
    for thread in threads:
        thread.__enter__()
    for thread in threads:
        thread.__exit__(None, None, None)
    assert len([job_id for job_id in found if job_id is not None]) == limit
    assert at_gate(stage) == len(jobs) - limit


def test_a_job_that_is_taken_from_the_gate_leaves_another_there(stage: Stage) -> None:
    """Whose permit has now been used; nobody else would let that one in."""
    stage.sidejob.queue(QUEUE).configure(limit=1)
    first, kept = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    assert [taken(stage, job) for job in (first, kept)] == [first.id, None]
    stage.holds[first.id].slot_in = None  # another permit comes before this end lets one in
    stage.perform(stage.holds[first.id])
    later = stage.job(queue=QUEUE)
    assert taken(stage, later) == kept.id
    assert at_gate(stage) == 1
    stage.perform(stage.holds[kept.id])
    assert at_gate(stage) == 0
    assert taken(stage, later) == later.id


def test_an_end_waits_for_a_permit_that_has_just_found_no_slot(stage: Stage) -> None:
    """It leaves its message at the gate after the slot was freed, and the end lets that in."""
    stage.sidejob.queue(QUEUE).configure(limit=1)
    first, second = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    assert taken(stage, first) == first.id
    with stage.connect() as other:
        other.execute("BEGIN")
        other.execute("SELECT FROM queues WHERE name = %s FOR NO KEY UPDATE", [QUEUE])  # as the permit does
        with in_thread(lambda: stage.perform(stage.holds[first.id])):
            wait_until(lambda: first.refresh().status == "completed", message="the end")
            other.execute(f"UPDATE messages SET published_at = NULL, gate = {Gate.QUEUE}, next_check_at = 'infinity'")
            stage.wait_for_waiters()
            other.execute("COMMIT")
    assert at_gate(stage) == 0
    assert taken(stage, second) == second.id


def let_in_and_unpublished(*jobs: Job) -> tuple[str, list[int]]:
    """Return SQL, with its parameters: these messages are due to be published, and nobody has done it yet."""
    due = "UPDATE messages SET gate = 0, next_check_at = clock_timestamp() WHERE job_id = ANY(%s)"
    return due, [job.id for job in jobs]


def those_at_gate(stage: Stage) -> list[int]:
    return [row[0] for row in stage.sql(f"SELECT job_id FROM messages WHERE gate = {Gate.QUEUE}")]


@pytest.mark.parametrize("settings", [{"limit": 5}, {"ordered": True}])
def test_a_job_takes_the_place_of_a_retry_that_ran_by_its_permit_before_it_was_published(
    stage: Stage, settings: dict[str, Any]
) -> None:
    """The retry will not be published itself, so the sweeper publishes that job."""
    stage.sidejob.queue(QUEUE).configure(**settings)
    retry, named, other = stage.job(queue=QUEUE, priority=9), stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    statement, ids = let_in_and_unpublished(retry)
    stage.sql(statement, ids)
    assert taken(stage, named) == retry.id
    assert stage.sql(TO_PUBLISH) == [(named.id,)]
    assert taken(stage, other) == named.id, "and the other takes its place in turn"
    assert stage.sql(TO_PUBLISH) == [(other.id,)]
    assert those_at_gate(stage) == []


def test_a_job_takes_the_place_of_another_if_the_chosen_one_begins_meanwhile(stage: Stage) -> None:
    """A claim that does not lock the queue has begun it since the statement's start: one permit more is under way."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    retry = stage.job(queue=QUEUE, priority=9)
    first, chosen, *others = (stage.job(queue=QUEUE, priority=priority) for priority in (9, 0, 0, 0))
    assert (taken(stage, first), taken(stage, retry)) == (retry.id, first.id), "from here on no claim locks the queue"
    retry = stage.job(queue=QUEUE, priority=9)
    statement, ids = let_in_and_unpublished(retry)
    stage.sql(statement, ids)
    with stage.connect() as client:
        client.execute("BEGIN")
        client.execute("SELECT FROM messages WHERE job_id = %s FOR SHARE", [retry.id])
        with in_thread(lambda: take(stage, chosen)):
            stage.wait_for_waiters()
            assert taken(stage, others[1]) == chosen.id
            client.execute("COMMIT")
    assert retry.refresh().status == "running"
    assert stage.sql(TO_PUBLISH) == [(others[0].id,)]


def test_a_job_takes_the_place_of_one_that_a_client_has_locked_if_there_is_no_other(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    retry, named = stage.job(queue=QUEUE, priority=9), stage.job(queue=QUEUE)
    statement, ids = let_in_and_unpublished(retry)
    stage.sql(statement, ids)
    with stage.connect() as client:
        client.execute("BEGIN")
        client.execute("SELECT FROM jobs WHERE id = %s FOR NO KEY UPDATE", [named.id])
        assert taken(stage, named) == retry.id
    assert stage.sql(TO_PUBLISH) == [(named.id,)]


def test_a_job_takes_the_place_of_a_retry_that_has_kept_its_slot_of_a_pool(stage: Stage) -> None:
    """The retry is due, and nobody has published it yet: the permit by which it begins is not its own."""
    stage.sidejob.queue(QUEUE).configure(limit=1)

    def retries(job: RunningJob) -> None:
        raise job.retry(countdown=1)

    limited = stage.task(retries, name="stage.retries", capacity=CapacityPool("slots", 1))
    retry = limited.enqueue(queue=QUEUE, priority=9)
    assert taken(stage, retry) == retry.id
    stage.perform(stage.holds[retry.id])
    named = stage.job(queue=QUEUE)
    stage.sql(
        "UPDATE messages SET due_at = due_at - interval '1 s', next_check_at = next_check_at - interval '1 s'"
        " WHERE job_id = %s", retry.id,
    )  # fmt: skip
    hold = runs.claim(
        stage.runtime, named.id, task=named.task, for_run=1, worker_id=stage.worker_id, queue=QUEUE,
        tasks=lambda: (named.task, retry.task),
    )  # fmt: skip
    assert hold is not None
    assert hold.job_id == retry.id
    assert stage.sql(TO_PUBLISH) == [(named.id,)]


def test_a_permit_of_an_earlier_run_is_not_that_of_a_retry_that_is_not_published(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(limit=1)
    running, retry, other = (stage.job(queue=QUEUE) for _ in range(3))
    assert taken(stage, running) == running.id
    statement, ids = let_in_and_unpublished(retry)
    stage.sql(statement, ids)
    assert taken(stage, retry) is None
    assert those_at_gate(stage) == [other.id], "the sweeper publishes the retry"


def test_a_permit_that_waited_for_the_queue_leaves_none_at_the_gate_that_was_let_in_meanwhile(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(limit=1)
    running, let_in, other = (stage.job(queue=QUEUE) for _ in range(3))
    assert taken(stage, running) == running.id
    assert taken(stage, let_in) is None
    with stage.connect() as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT FROM queues WHERE name = %s FOR NO KEY UPDATE", [QUEUE])
        with in_thread(lambda: take(stage, running)):
            stage.wait_for_waiters()
            statement, ids = let_in_and_unpublished(let_in)
            connection.execute(statement, [ids])
            connection.execute("COMMIT")
    assert those_at_gate(stage) == [other.id]


def test_a_mark_of_an_earlier_message_does_not_say_that_one_is_published_that_was_let_in(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(limit=1)
    running, job = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    assert (taken(stage, running), taken(stage, job)) == (running.id, None)
    statement, ids = let_in_and_unpublished(job)
    stage.sql(statement, ids)
    stage.runtime.connections.transact("mark", lambda executor: mark_published(executor, JOBS, [(job.id, 1)]))
    assert stage.sql("SELECT published_at FROM messages WHERE job_id = %s", job.id)[0][0] is None


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_served_in_turn(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(limit_per_key=2)
    big = [stage.job(queue=QUEUE, limit_key="big") for _ in range(6)]
    small = [stage.job(queue=QUEUE, limit_key="small") for _ in range(2)]
    free = stage.job(queue=QUEUE)
    order = [taken(stage, big[0]) for _ in range(6)]
    assert order[:5] == [big[0].id, small[0].id, free.id, big[1].id, small[1].id]
    assert order[5] is None, "big runs twice already"
    assert big[2].waiting_for == ["limit"]


@pytest.mark.few(1)
def test_a_customer_with_ten_thousand_jobs_does_not_starve_one_with_ten(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(limit_per_key=100)
    stage.sidejob.enqueue_many([{"task": stage.idle, "queue": QUEUE, "limit_key": "big"}] * 2000)
    small = stage.sidejob.enqueue_many([{"task": stage.idle, "queue": QUEUE, "limit_key": "small"}] * 10)
    found = {taken(stage, small[0]) for _ in range(21)}
    assert {job.id for job in small} <= found


# -- rates -------------------------------------------------------------------------------------------------------------


def test_a_rate_lets_its_burst_begin_and_then_one_at_a_time(stage: Stage) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(rate="2/m")
    assert queue.rate == "2/m"
    jobs = [stage.job(queue=QUEUE) for _ in range(4)]
    assert [taken(stage, job) for job in jobs] == [jobs[0].id, jobs[1].id, None, None]
    assert jobs[2].waiting_for == ["rate"]
    assert queues.let_in(stage.runtime) == 0
    stage.sql("UPDATE queues SET rate_opens_at = rate_opens_at - interval '31 s'")
    assert queues.let_in(stage.runtime) == 1
    assert taken(stage, jobs[2]) == jobs[2].id
    assert taken(stage, jobs[3]) is None


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"limit": 0}, "limit of queue 'mail' is a number of runs at once, from 1"),
        ({"limit": "5"}, "limit of queue 'mail'"),
        ({"limit_per_key": True}, "limit_per_key of queue 'mail'"),
        ({"rate": "often"}, "rate of queue 'mail' is runs per second"),
        ({"ordered": 1}, "ordered of queue 'mail' is True or False"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_changed(
    stage: Stage, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidValueError, match=says):
        stage.sidejob.queue(QUEUE).configure(**settings)
    assert stage.sidejob.queues() == []


def test_a_declaration_is_applied_when_it_differs_from_the_last_one(stage: Stage) -> None:
    def declare(limit: int) -> None:
        queues.apply_declared(stage.runtime, {QUEUE: {"limit": limit}})

    queue = stage.sidejob.queue(QUEUE)
    declare(5)
    assert queue.limit == 5
    queue.configure(limit=2)
    declare(5)
    assert queue.limit == 2, "what a person has set stays"
    declare(6)
    assert queue.limit == 6


# -- managed no more ---------------------------------------------------------------------------------------------------


def published(stage: Stage) -> list[int]:
    stage.sidejob.poll()
    return [row[0] for row in stage.sql("SELECT job_id FROM messages WHERE published_at IS NOT NULL ORDER BY job_id")]


def test_a_queue_that_is_managed_no_more_lets_in_all_that_waits_at_its_gate(stage: Stage) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(limit=1)
    jobs = [stage.job(queue=QUEUE, priority=priority) for priority in (1, 2, 3)]
    assert [taken(stage, job) for job in jobs] == [jobs[2].id, None, None]
    queue.pause()
    assert queue.unmanage()
    assert (queue.managed, queue.paused, queue.limit, stage.sidejob.queues()) == (False, False, None, [])
    assert at_gate(stage) == 0
    assert set(published(stage)) >= {jobs[0].id, jobs[1].id}
    assert [taken(stage, job) for job in jobs] == [jobs[0].id, jobs[1].id, None], "each by its own name"
    assert not queue.unmanage()
    for job in jobs:
        stage.perform(stage.holds[job.id])
    assert {job.refresh().status for job in jobs} == {"completed"}


def test_a_permit_that_waits_while_its_queue_becomes_unmanaged_begins_the_job_that_it_names(
    stage: Stage, at: Arm
) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(limit=1)
    low, high = stage.job(queue=QUEUE, priority=1), stage.job(queue=QUEUE, priority=2)
    assert taken(stage, low) == high.id
    found: list[int | None] = []
    with another_waits(stage, at, "unmanage:before-commit", lambda: found.append(taken(stage, low))):
        queue.unmanage()
    assert found == [low.id]


def test_what_a_permit_leaves_at_the_gate_while_its_queue_is_to_become_unmanaged_is_let_in(
    stage: Stage, at: Arm
) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(limit=1)
    first, second = stage.job(queue=QUEUE), stage.job(queue=QUEUE)
    assert taken(stage, first) == first.id
    with another_waits(stage, at, "permit:before-commit", queue.unmanage):
        assert taken(stage, second) is None
    assert (at_gate(stage), queue.managed) == (0, False)
    assert taken(stage, second) == second.id


def test_a_message_that_a_client_is_changing_is_let_in_too(stage: Stage, at: Arm) -> None:
    queue = stage.sidejob.queue(QUEUE)
    queue.pause()
    job = stage.job(queue=QUEUE)
    assert taken(stage, job) is None
    with another_waits(stage, at, "set-priority:before-commit", queue.unmanage):
        job.set_priority(9)
    assert at_gate(stage) == 0
    assert published(stage) == [job.id]


def test_a_priority_that_is_set_after_a_queue_was_managed_publishes_again(stage: Stage) -> None:
    """The message has the rank that it got before, and nobody goes by that any more."""
    queue = stage.sidejob.queue(QUEUE).configure(ordered=True)
    job = stage.job(queue=QUEUE, priority=1)
    queue.unmanage()
    stage.sql("UPDATE messages SET published_at = now(), next_check_at = now() + interval '1 h'")
    job.set_priority(9)
    assert stage.sql("SELECT published_at FROM messages") == [(None,)]


def test_a_queue_that_is_managed_again_goes_by_the_priorities_of_now(stage: Stage) -> None:
    queue = stage.sidejob.queue(QUEUE).configure(ordered=True)
    jobs = [stage.job(queue=QUEUE, priority=1), stage.job(queue=QUEUE, priority=5)]
    queue.unmanage()
    jobs[0].set_priority(9)
    jobs.append(stage.job(queue=QUEUE, priority=7))
    queue.configure(ordered=True)
    assert [taken(stage, jobs[1]) for _ in jobs] == [jobs[0].id, jobs[2].id, jobs[1].id]


@pytest.mark.parametrize("declared", [{"limit": 5}, {"limit": 5, "pool": CapacityPool("p", 1)}])
def test_a_queue_that_is_declared_stays_managed(stage: Stage, declared: dict[str, Any]) -> None:
    stage.sidejob.queue(QUEUE).configure(limit=5)
    stage.sidejob.queue("other").configure(limit=5)
    queues = {QUEUE: declared, "other": {"pool": CapacityPool("p", 1)}}
    declares = make_app("declares", sidejob_database_url=stage.database_url, sidejob_queues=queues).sidejob
    with pytest.raises(InvalidValueError, match="declared in sidejob_queues"):
        declares.queue(QUEUE).unmanage()
    assert declares.queue("other").unmanage(), "a capacity pool is no management"
    declares.close()
    assert [queue.name for queue in stage.sidejob.queues()] == [QUEUE]


# -- at the gate -------------------------------------------------------------------------------------------------------


def test_another_is_left_at_the_gate_if_the_chosen_one_begins_meanwhile(stage: Stage) -> None:
    """A claim that does not lock the queue has begun it: that message is used, and the permit is another's."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    other_task = stage.task(does_nothing, name="stage.other")
    running = stage.job(queue=QUEUE)
    chosen, next_one = (stage.sidejob.enqueue(other_task, queue=QUEUE) for _ in range(2))
    assert taken(stage, running) == running.id
    with stage.connect() as claim:
        claim.execute("BEGIN")
        claim.execute(
            "UPDATE messages SET locked_by = %s, locked_at = now(), next_check_at = 'infinity' WHERE job_id = %s",
            [stage.worker_id, chosen.id],
        )
        with in_thread(lambda: take(stage, running)):
            stage.wait_for_waiters()
            claim.execute("COMMIT")
    stage.sql(
        "UPDATE jobs SET status = 'running', run_no = 1, unit_no = 0, run_kind = 'run', worker_id = %s,"
        " wakes_taken = wakes WHERE id = %s", stage.worker_id, chosen.id,
    )  # fmt: skip
    assert those_at_gate(stage) == [next_one.id]


def test_a_job_that_a_client_has_locked_waits_at_the_gate_if_nothing_else_is_under_way(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    job = stage.job(queue=QUEUE)
    with stage.connect() as client:
        client.execute("BEGIN")
        client.execute("SELECT FROM jobs WHERE id = %s FOR NO KEY UPDATE", [job.id])
        assert taken(stage, job) is None
        assert those_at_gate(stage) == [job.id]
    assert queues.let_in(stage.runtime) == 1
    assert taken(stage, job) == job.id


@pytest.mark.parametrize("change", ["its priority", "its end"])
def test_a_permit_waits_for_the_client_that_changes_its_message(stage: Stage, at: Arm, change: str) -> None:
    """What the client has written stays: only a message that still waits is left at the gate."""
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    job = stage.job(queue=QUEUE)
    if change == "its priority":
        with another_waits(stage, at, "set-priority:before-commit", lambda: take(stage, job)):
            job.set_priority(9)
        assert those_at_gate(stage) == [job.id]
        assert [waiting.id for waiting in stage.sidejob.queue(QUEUE).peek()] == [job.id]
        assert queues.let_in(stage.runtime) == 1
        assert taken(stage, job) == job.id
    else:
        with another_waits(stage, at, "terminate:before-commit", lambda: take(stage, job)):
            job.terminate(without_shutdown=True)
        assert (job.refresh().status, stage.sql("SELECT count(*) FROM messages")) == ("terminated", [(0,)])


def test_a_mark_that_comes_late_takes_nothing_from_the_gate(stage: Stage) -> None:
    """It says that the broker has the message, which has come and gone."""
    stage.sidejob.queue(QUEUE).pause()
    job = stage.job(queue=QUEUE)
    assert taken(stage, job) is None
    stage.runtime.connections.transact("mark", lambda executor: mark_published(executor, JOBS, [(job.id, 1)]))
    assert at_gate(stage) == 1


def test_what_waits_at_a_gate_is_not_missed_in_a_broker_that_was_emptied(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).pause()
    at_the_gate, under_way = stage.job(queue=QUEUE), stage.job()
    stage.sql("UPDATE messages SET published_at = now(), next_check_at = now() + interval '1 h'")
    assert taken(stage, at_the_gate) is None
    rows = publishing.in_broker(stage.runtime.connections, JOBS, after=0)
    assert [row.key for row in rows] == [under_way.id]
    assert publishing.in_queue(stage.runtime.connections, QUEUE, limit=9) == 0


def test_a_delivery_runs_only_tasks_with_its_own_time_limits(stage: Stage) -> None:
    different = {
        "hard": {"time_limit": 5}, "soft": {"soft_time_limit": 5}, "leased": {"lease": 300, "lease_renewal": "manual"},
    }  # fmt: skip
    for name, options in {"same": {}, **different}.items():
        stage.task(does_nothing, name=f"stage.{name}", **options)
    named = stage.app.tasks["stage.same"]
    found = set(like(named, Context({"timelimit": [None, None]})))
    assert {"stage.same", stage.idle.name} <= found
    assert found.isdisjoint({"stage.hard", "stage.soft", "stage.leased"})
    assert like(named, Context({"timelimit": [5, None]})) == ()

"""Capacity pools of jobs: never more than the limit, whoever asks at once, whoever dies, whatever answer is lost."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kombu.exceptions import OperationalError

from celery_sidejob import (
    CapacityPool,
    IllegalMoveError,
    InvalidValueError,
    Job,
    Overloaded,
    PoolConflictError,
    RunningJob,
    SettingsError,
)
from celery_sidejob.jobs.capacity import SlotHolder, declare
from celery_sidejob.model.status import Gate
from celery_sidejob.operations.changes.follow_up import apply_noted_asks
from celery_sidejob.operations.gates import capacity, queues
from celery_sidejob.services.sweep.gates import CapacitySamples
from celery_sidejob.services.sweep.sweep import Sweep
from tests.acceptance.lenders import LENDERS
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.threads import in_thread
from tests.tools.waiting import patient, wait_until

EXAMPLES = int(os.environ.get("SIDEJOB_POOL_EXAMPLES", "15"))
"""How often the machine is run: 8,000 make up to 200,000 operations."""


def slots(stage: Stage, name: str = "mail") -> list[tuple[int, int, int]]:
    """What each shard has: (used, admitted, freed)."""
    return stage.sql("SELECT used, admitted, freed FROM capacity_shards WHERE pool = %s ORDER BY shard", name)


def held(stage: Stage, name: str = "mail") -> int:
    """The slots that rows hold, by which the counter is judged."""
    found: int = stage.sql(
        "SELECT coalesce(sum(pool_weight), 0) FROM messages WHERE pool = %s AND pool_shard IS NOT NULL", name
    )[0][0]
    return found


def nothing(job: RunningJob) -> None:
    """Do nothing."""


def fails(job: RunningJob) -> None:
    raise ValueError("for good")


def task_of(stage: Stage, pool: CapacityPool, body: Any = nothing, name: str = "stage.limited") -> Any:
    return stage.task(body, name=name, capacity=pool)


# -- what a slot is ----------------------------------------------------------------------------------------------------


def test_a_full_pool_refuses_and_writes_nothing(stage: Stage) -> None:
    pool = CapacityPool("mail", 2)
    limited = task_of(stage, pool)
    made = [limited.enqueue(), limited.enqueue()]
    stage.runtime.connections.write_behind_now()
    before = stage.everything()
    with pytest.raises(Overloaded, match=r"Capacity pool 'mail' is full \(2 of 2 slots are taken\)") as refused:
        limited.enqueue()
    full = refused.value
    assert (full.pool, full.limit, full.used, full.retry_after) == ("mail", 2, 2, 60.0)
    assert isinstance(full, OperationalError)
    assert vars(pickle.loads(pickle.dumps(full))) == vars(full)
    stage.runtime.connections.write_behind_now()
    after = stage.everything()
    assert before.pop("capacity_pools") != after.pop("capacity_pools"), "the refusal is counted"
    assert before == after
    stage.run(made[0])
    assert (pool.used, limited.enqueue().status, pool.used) == (1, "queued", 2)


@pytest.mark.parametrize("end", ["completed", "failed", "terminated", "suspended"])
def test_a_job_at_rest_holds_no_slot(stage: Stage, end: str) -> None:
    pool = CapacityPool("mail", 1)
    body = {"failed": fails, "suspended": lambda job: job.suspend()}.get(end, nothing)

    def run(job: RunningJob) -> None:
        body(job)

    job = task_of(stage, pool, run).enqueue()
    if end == "terminated":
        job.terminate()
        assert pool.used == 1, "its shutdown is due"
    stage.drain()
    assert (job.refresh().status, slots(stage)) == (end, [(0, 1, 1)])


def test_a_job_holds_its_slot_through_its_run_a_retry_and_a_rescue(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)

    def retries(job: RunningJob) -> None:
        raise job.retry(countdown=60)

    job = task_of(stage, pool, retries).enqueue()
    dead = stage.new_worker()
    hold = stage.claim(job, worker_id=dead)
    assert (hold is not None, pool.used) == (True, 1)
    stage.declare_dead(dead)
    stage.sidejob.poll()
    assert (job.refresh().status, slots(stage)) == ("queued", [(1, 1, 0)])
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert (job.refresh().status, slots(stage)) == ("queued", [(1, 1, 0)])


def test_a_job_that_is_given_up_frees_its_slot(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    job = stage.task(nothing, name="stage.once", capacity=pool, max_losses=1).enqueue()
    dead = stage.new_worker()
    assert stage.claim(job, worker_id=dead)
    stage.declare_dead(dead)
    stage.sidejob.poll()
    assert (job.refresh().status, slots(stage)) == ("failed", [(0, 1, 1)])


def test_a_deleted_tree_frees_its_slots(stage: Stage) -> None:
    pool = CapacityPool("mail", 5)
    limited = task_of(stage, pool)
    parent = limited.enqueue()
    for name in ("a", "b"):
        parent.enqueue(limited, child_name=name)
    assert pool.used == 3
    parent.terminate(recursive=True)
    stage.drain()
    assert parent.delete()
    assert slots(stage) == [(0, 3, 3)]


def test_wakes_and_timers_are_never_refused_and_wait(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    limited = task_of(stage, pool)
    first, later = limited.enqueue(), limited.enqueue(countdown=60)
    stage.run(first)
    other = limited.enqueue()
    assert (first.run(), first.waiting_for, pool.used) == (first, ["pool"], 1), "a wake"
    stage.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", later.id)
    apply_noted_asks(stage.runtime, [later.id])
    assert (later.waiting_for, stage.claim(first), stage.claim(later)) == (["pool"], None, None)
    for job, behind in ((other, first), (first, later), (later, None)):
        assert (stage.run(job), pool.used) == ("completed", 0 if behind is None else 1)
        assert behind is None or behind.waiting_for == []
    assert slots(stage) == [(0, 4, 4)]


def test_a_job_that_is_asked_again_during_its_run_keeps_its_one_slot(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    job = task_of(stage, pool).enqueue()
    hold = stage.claim(job)
    job.run()
    assert hold is not None
    stage.perform(hold)
    assert (job.refresh().status, slots(stage)) == ("queued", [(1, 1, 0)])
    stage.drain()
    assert slots(stage) == [(0, 1, 1)]


def test_a_dead_entry_that_is_retried_takes_a_slot(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    job = task_of(stage, pool, fails).enqueue()
    stage.drain()
    (entry,) = stage.sidejob.dead.list()
    stage.sidejob.dead.retry(entry.id)
    assert (job.refresh().status, pool.used) == ("queued", 1)


# -- waiting -----------------------------------------------------------------------------------------------------------


def full(stage: Stage, pool: CapacityPool) -> Job:
    """Fill a pool of one slot; returns the job that has it."""
    job: Job = pool.apply_async(stage.idle).job
    return job


def waiting(stage: Stage, pool: CapacityPool, **options: Any) -> Job:
    job: Job = pool.apply_async(stage.idle, on_full="wait", **options).job
    assert (job.status, job.waiting_for) == ("queued", ["pool"])
    return job


def test_who_waits_gets_its_slot_by_the_commit_that_frees_it_oldest_first_within_a_priority(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    order = [full(stage, pool)]
    low, high = [waiting(stage, pool) for _ in range(3)], [waiting(stage, pool, priority=5) for _ in range(3)]
    last = waiting(stage, pool)
    last.set_priority(9)
    order += [last, *high, *low]
    with pytest.raises(Overloaded):
        pool.cast(stage.idle)
    for job in order:
        assert pool.children()[0].job == job
        assert stage.run(job) == "completed"
    assert slots(stage) == [(0, 8, 8)]


def test_a_work_that_finds_room_does_not_wait(stage: Stage) -> None:
    pool = CapacityPool("mail", 2, shards=2)
    jobs = [pool.apply_async(stage.idle, on_full="wait").job for _ in range(2)]
    assert [job.waiting_for for job in jobs] == [[], []]
    assert (pool.used, held(stage)) == (2, 2)
    published = "SELECT count(*) FROM messages WHERE published_at IS NOT NULL"
    stage.runtime.connections.write_behind_now()
    assert stage.sql(published) == [(2,)]


@pytest.mark.parametrize("forced", [False, True])
def test_nothing_makes_a_waiting_job_run_without_a_slot(stage: Stage, forced: bool) -> None:
    pool = CapacityPool("mail", 1)
    first = full(stage, pool)
    job = waiting(stage, pool)
    job.run(force=forced)
    stage.sidejob.poll()
    assert (job.waiting_for, stage.claim(job), pool.used) == (["pool"], None, 1)
    stage.run(first)
    assert (stage.run(job), pool.used) == ("completed", 0)


def test_a_waiting_job_is_terminated_at_once_and_takes_no_slot(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    full(stage, pool)
    job = waiting(stage, pool)
    job.terminate()
    assert (stage.run(job), slots(stage)) == ("terminated", [(1, 1, 0)])
    assert job.delete()
    job = waiting(stage, pool)
    stage.sql("DELETE FROM jobs WHERE id = %s", job.id)
    assert slots(stage) == [(1, 1, 0)]


def test_a_forced_job_that_was_terminated_waits_like_any_other(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    first = full(stage, pool)
    job = waiting(stage, pool)
    job.terminate()
    job.run(force=True)
    assert stage.run(job) == "queued"
    assert job.waiting_for == ["pool"]
    stage.run(first)
    assert stage.run(job) == "completed"


def test_a_retry_has_its_slot_and_does_not_wait(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)

    def retries(job: RunningJob) -> None:
        if not job.get("again"):
            raise job.retry(countdown=60)

    job = task_of(stage, pool, retries).enqueue()
    assert stage.run(job) == "queued"
    other = waiting(stage, pool)
    assert (job.waiting_for, pool.used) == (["retry"], 1)
    job.set(again=True)
    job.run(force=True)
    assert (stage.run(job), other.waiting_for) == ("completed", [])


def test_heavy_works_are_not_overtaken_by_light_ones(stage: Stage) -> None:
    pool = CapacityPool("mail", 2)
    first, second = full(stage, pool), full(stage, pool)
    heavy, light = waiting(stage, pool, weight=2), waiting(stage, pool)
    stage.run(first)
    assert (heavy.waiting_for, light.waiting_for, pool.used) == (["pool"], ["pool"], 1)
    stage.run(second)
    assert (heavy.waiting_for, light.waiting_for, pool.used) == ([], ["pool"], 2)
    stage.run(heavy)
    assert (light.waiting_for, pool.used) == ([], 1)


def test_a_work_that_is_heavier_than_the_pool_runs_alone(stage: Stage) -> None:
    pool = CapacityPool("mail", 4)
    first = full(stage, pool)
    heavy = waiting(stage, pool, weight=4)
    pool.resize(2)
    assert heavy.waiting_for == ["pool"]
    stage.run(first)
    assert (stage.run(heavy), pool.used) == ("completed", 0)


def test_a_larger_pool_lets_in_who_waits(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    full(stage, pool)
    jobs = [waiting(stage, pool) for _ in range(3)]
    pool.resize(3)
    assert [job.waiting_for for job in jobs] == [[], [], ["pool"]]
    assert pool.used == 3


def test_the_slot_of_a_job_that_is_given_up_is_handed_over_by_the_rescue(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    job = stage.task(nothing, name="stage.once", capacity=pool, max_losses=1).enqueue()
    other = waiting(stage, pool)
    dead = stage.new_worker()
    assert stage.claim(job, worker_id=dead)
    stage.declare_dead(dead)
    stage.sidejob.poll()
    assert (job.refresh().status, other.waiting_for, slots(stage)) == ("failed", [], [(1, 2, 1)])


def test_who_was_locked_when_the_slot_was_freed_gets_it_by_the_sweeper(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    first = full(stage, pool)
    job = waiting(stage, pool)
    with stage.connect(autocommit=False) as connection:
        connection.execute("SELECT FROM messages WHERE job_id = %s FOR UPDATE", [job.id])
        stage.run(first)
        assert (job.waiting_for, pool.used) == (["pool"], 0)
    stage.sidejob.poll()
    assert (job.waiting_for, pool.used) == ([], 1)


def test_who_comes_while_a_slot_is_being_freed_is_not_forgotten(stage: Stage) -> None:
    """It looks for room under the lock of whoever frees the slot, who cannot see it yet."""
    pool = CapacityPool("mail", 1)
    first = full(stage, pool)
    first.terminate()
    found: list[Job] = []
    with stage.connect(autocommit=False) as connection:
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        connection.execute("DELETE FROM messages WHERE job_id = %s", [first.id])
        with in_thread(lambda: found.append(pool.apply_async(stage.idle, on_full="wait").job)):
            stage.wait_for_waiters()
            connection.commit()
    assert (found[0].waiting_for, pool.used) == ([], 1)
    stage.sql("DELETE FROM jobs WHERE id = %s", first.id)


def test_jobs_of_one_pool_that_wait_cost_no_look_at_all_of_them(stage: Stage) -> None:
    """Whoever frees a slot finds the next by an index."""
    pool = CapacityPool("mail", 1)
    full(stage, pool)
    waiting(stage, pool)
    with stage.connect() as connection:
        connection.execute("SET enable_seqscan = off")
        shown = " ".join(
            row[0]
            for row in connection.execute(
                f"EXPLAIN SELECT m.task_id FROM messages m WHERE m.pool = 'mail' AND m.gate = {Gate.POOL}"
                " AND m.due_at <= now() ORDER BY m.pool_rank DESC, m.due_at, m.job_id LIMIT 1"
            )
        )
    assert "messages_pool_waiting_idx" in shown
    assert "Sort" not in shown


# -- slots for what runs -----------------------------------------------------------------------------------------------


def runs_of(stage: Stage, pool: CapacityPool, body: Any = nothing) -> list[Job]:
    limited = task_of(stage, pool, body)
    return [limited.enqueue() for _ in range(3)]


def test_no_call_is_refused_and_the_limit_runs_at_once(stage: Stage) -> None:
    pool = CapacityPool("mail", 1, covers="running")
    jobs = runs_of(stage, pool)
    assert [job.waiting_for for job in jobs] == [[], ["pool"], ["pool"]]
    with pytest.raises(InvalidValueError, match="nothing to drop"):
        pool.apply_async(stage.idle, on_full="drop")
    for job, behind in zip(jobs, [*jobs[1:], None], strict=True):
        assert (pool.used, stage.run(job)) == (1, "completed")
        assert behind is None or behind.waiting_for == []
    assert slots(stage) == [(0, 3, 3)]


@pytest.mark.parametrize("how", ["retry", "suspend", "again", "loss"])
def test_a_run_that_ends_frees_its_slot_whatever_comes_next(stage: Stage, how: str) -> None:
    pool = CapacityPool("mail", 1, covers="running")

    def body(job: RunningJob) -> None:
        if how == "retry":
            raise job.retry(countdown=60)
        if how == "again":
            stage.outside(Job(job.id, runtime=stage.runtime).run)
        if how == "suspend":
            job.suspend()

    first, second, third = runs_of(stage, pool, body)
    worker_id = stage.new_worker()
    hold = stage.claim(first, worker_id=worker_id)
    assert hold is not None
    if how == "loss":
        stage.declare_dead(worker_id)
        stage.sidejob.poll()
        assert (first.refresh().info["losses"], pool.used) == (1, 1)
    else:
        stage.perform(hold)
        assert (second.waiting_for, third.waiting_for, pool.used) == ([], ["pool"], 1)
    expected = {"retry": ["retry"], "again": ["pool"], "suspend": []}
    assert how == "loss" or first.waiting_for == expected[how]
    assert held(stage) == 1
    if how == "retry":
        stage.sql("UPDATE messages SET due_at = now() - interval '1 s' WHERE job_id = %s", first.id)
        assert first.waiting_for == ["pool"]


def test_a_retry_gets_its_slot_when_its_time_has_come_by_the_sweeper(stage: Stage) -> None:
    pool = CapacityPool("mail", 1, covers="running")

    def body(job: RunningJob) -> None:
        raise job.retry(countdown=60)

    job = task_of(stage, pool, body).enqueue()
    assert (stage.run(job), pool.used, job.waiting_for) == ("queued", 0, ["retry"])
    stage.sql("ALTER TABLE messages DISABLE TRIGGER messages_enter_pool")
    try:
        stage.sql("UPDATE messages SET due_at = due_at - interval '61 s'")
    finally:
        stage.sql("ALTER TABLE messages ENABLE TRIGGER messages_enter_pool")
    assert job.waiting_for == ["pool"]
    stage.sidejob.poll()
    assert (job.waiting_for, pool.used) == ([], 1)


def test_a_shutdown_needs_no_slot_for_runs(stage: Stage) -> None:
    pool = CapacityPool("mail", 1, covers="running")
    first, second, _ = runs_of(stage, pool)
    hold = stage.claim(first)
    first.terminate()
    second.terminate()
    assert stage.run(second) == "terminated"
    assert hold is not None
    stage.perform(hold)
    assert (stage.run(first), pool.used) == ("terminated", 1)


# -- how it is asked for -----------------------------------------------------------------------------------------------


def test_a_pool_is_called_with_weights_and_without_a_bound(stage: Stage) -> None:
    pool = CapacityPool("mail", 3)
    result = pool.apply_async(stage.idle, weight=2)
    assert (result.job.status, pool.used) == ("queued", 2)
    with pytest.raises(Overloaded):
        pool.apply_async(stage.idle, weight=2)
    assert pool.apply_async(stage.idle.s(), weight=2, on_full="drop") is None
    assert pool.apply_async("stage.idle", weight=2, bounded=False).job.exists
    assert (pool.used, pool.limit, held(stage)) == (4, 3, 4)
    assert pool.cast(stage.idle, bounded=False) is None
    stage.drain()
    assert slots(stage) == [(0, 3, 3)]


def test_a_call_s_pool_comes_before_its_task_s(stage: Stage) -> None:
    own, other = CapacityPool("mail", 1), CapacityPool("other", 1)
    limited = task_of(stage, own)
    other.apply_async(limited)
    assert (own.used, other.used) == (0, 1)


def test_what_is_put_into_a_queue_with_a_pool_takes_slots(stage: Stage) -> None:
    pool, own = CapacityPool("mail", 1), CapacityPool("own", 1)
    app = make_app(
        "queues", sidejob_database_url=stage.database_url, sidejob_queues={"q": {"pool": pool}, "r": {"limit": 3}},
        sidejob_durable_tasks=["other"],
    )  # fmt: skip
    try:
        app.task(plain, name="other", shared=False)
        limited, free = (app.sidejob.task(nothing, name=name, capacity=of) for name, of in (("a", own), ("b", None)))
        queues.apply_declared(app.sidejob.runtime, app.sidejob.settings.queues)
        assert [queue.name for queue in app.sidejob.queues()] == ["r"], "a pool alone does not manage a queue"
        app.sidejob.register_tasks()
        job = free.enqueue(queue="q")
        with pytest.raises(Overloaded):
            free.enqueue(queue="q")
        with pytest.raises(Overloaded):
            app.send_task("other", queue="q")
        waits = app.send_task("other", queue="q", root_id="x")
        for _ in range(2):
            free.enqueue(queue="r")
        assert limited.enqueue(queue="q").info["pool"] == "own"
        assert [holder.task_id for holder in pool.children()] == [job.task_id]
        stage.sql("DELETE FROM jobs WHERE id = %s", job.id)
        assert [holder.task_id for holder in pool.children()] == [waits.id]
    finally:
        app.sidejob.close()
        app.close()
    wrong = make_app("wrong", sidejob_database_url=stage.database_url, sidejob_queues={"q": {"pool": 7}})
    with pytest.raises(SettingsError, match="sidejob_queues"):
        wrong.sidejob.poll()
    wrong.close()


def test_children_tells_who_holds_slots(stage: Stage) -> None:
    pool = CapacityPool("mail", 5)
    limited = task_of(stage, pool)
    jobs = [limited.enqueue(), limited.enqueue(queue="other")]
    stage.claim(jobs[0])
    queue = jobs[0].queue
    assert pool.children() == [
        SlotHolder(jobs[0].task_id, jobs[0], "stage.limited", queue, 1, True),
        SlotHolder(jobs[1].task_id, jobs[1], "stage.limited", "other", 1, False),
    ]


def test_each_key_has_a_pool_of_its_own(stage: Stage) -> None:
    pool = CapacityPool("mail", 1, shards=1)
    for key in (7, "x"):
        pool.for_key(key).cast(stage.idle)
        with pytest.raises(Overloaded) as refused:
            pool.for_key(key).cast(stage.idle)
        assert refused.value.pool == f"mail:{key}"
    assert pool.used == 0


def test_many_at_once_are_admitted_or_refused_together(stage: Stage) -> None:
    pool = CapacityPool("mail", 5, shards=2)
    limited = task_of(stage, pool)
    stage.sidejob.enqueue_many([{"task": limited}] * 4)
    with pytest.raises(Overloaded):
        stage.sidejob.enqueue_many([{"task": limited}] * 2)
    assert (pool.used, held(stage)) == (4, 4)
    stage.sidejob.enqueue_many([{"task": limited}, {"task": stage.idle}])
    assert (pool.used, held(stage)) == (5, 5)


def test_a_job_of_a_task_whose_code_is_elsewhere_is_admitted_by_name(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    task_of(stage, pool)
    stage.sidejob.register_tasks()
    client = make_app("client", sidejob_database_url=stage.database_url)
    try:
        client.sidejob.enqueue("stage.limited", queue="q")
        with pytest.raises(Overloaded):
            client.sidejob.enqueue("stage.limited", queue="q")
        stage.sql("DELETE FROM capacity_pools")
        with pytest.raises(InvalidValueError, match="does not exist yet"):
            client.sidejob.enqueue("stage.limited", queue="q")
    finally:
        client.sidejob.close()
        client.close()


def test_a_pool_is_called_and_waited_for_outside_of_tasks(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)

    def body(job: RunningJob) -> None:
        pool.call(stage.idle)

    with pytest.raises(IllegalMoveError, match="is refused in a task"):
        stage.inside(body)
    assert slots(stage) == []


def test_a_unique_job_that_is_found_takes_no_slot(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    limited = task_of(stage, pool)
    first = limited.enqueue(unique="k")
    with pytest.raises(Overloaded):
        limited.enqueue(unique="other")
    assert pool.used == 1
    stage.run(first)
    second = limited.enqueue(unique="k", aliases=["named"])
    assert (second != first, slots(stage)) == (True, [(1, 2, 1)])


# -- declaring it ------------------------------------------------------------------------------------------------------


def test_a_pool_declared_again_alike_is_the_same_and_otherwise_refused(stage: Stage) -> None:
    CapacityPool("mail", 2).cast(stage.idle)
    CapacityPool("mail", 2).cast(stage.idle)
    for other in (
        CapacityPool("mail", 3),
        CapacityPool("mail", 2, shards=2),
        CapacityPool("mail", 2, covers="running"),
    ):
        with pytest.raises(PoolConflictError, match=r"exists with limit 2, shards 1 and covers 'queued'"):
            other.cast(stage.idle, bounded=False)
    assert CapacityPool("mail", 2).used == 2


def test_a_resized_pool_takes_both_declarations(stage: Stage) -> None:
    old, new = CapacityPool("mail", 5, shards=2), CapacityPool("mail", 3, shards=2)
    for _ in range(4):
        old.cast(stage.idle)
    old.resize(3)
    assert (old.limit, new.limit, old.used) == (3, 3, 4)
    for pool in (old, new):
        with pytest.raises(Overloaded):
            pool.cast(stage.idle)
    stage.drain()
    for pool in (old, new, new):
        pool.cast(stage.idle)
    with pytest.raises(Overloaded):
        old.cast(stage.idle)
    with pytest.raises(PoolConflictError, match=r"limit 5 \(now 3\)"):
        CapacityPool("mail", 4, shards=2).cast(stage.idle)
    with pytest.raises(InvalidValueError, match="has 2 shards and cannot have 1 slots"):
        new.resize(1)
    assert stage.sql("SELECT capacity FROM capacity_shards ORDER BY shard") == [(2,), (1,)]


def test_workers_refuse_to_start_with_another_declaration(stage: Stage) -> None:
    task_of(stage, CapacityPool("mail", 3))
    CapacityPool("mail", 2).cast(stage.idle)
    with pytest.raises(PoolConflictError):
        stage.sidejob.register_tasks()


def test_what_is_no_pool_is_refused() -> None:
    for name in ("", 7, "a\0", "x" * 256):
        with pytest.raises(InvalidValueError, match="cannot be the name of a capacity pool"):
            CapacityPool(name, 1)  # type: ignore[arg-type]
    for limit in (0, -1, 1.5, True, None, 2**31):
        with pytest.raises(InvalidValueError, match="The limit of capacity pool 'p'"):
            CapacityPool("p", limit)  # type: ignore[arg-type]
    for shards in (0, 1025, "2"):
        with pytest.raises(InvalidValueError, match="shards of capacity pool 'p'"):
            CapacityPool("p", 5000, shards=shards)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="covers of capacity pool 'p' is one of 'queued', 'running', not 'all'"):
        CapacityPool("p", 2, covers="all")
    with pytest.raises(InvalidValueError, match="2 slots and 3 shards"):
        CapacityPool("p", 2, shards=3)
    with pytest.raises(InvalidValueError, match="key of a capacity pool is empty"):
        CapacityPool("p", 2).for_key("")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": 0}, "weight is a whole number"),
        ({"weight": 3}, "weight=3 does not fit into capacity pool 'mail': a shard has 2 slots at most"),
        ({"on_full": "later"}, "on_full is one of 'refuse', 'wait', 'drop', not 'later'"),
        ({"bounded": False, "on_full": "wait"}, "leave on_full= out"),
        ({"bounded": 1}, "bounded is True or False"),
    ],
)
def test_wrong_calls_are_refused_before_anything_is_written(
    stage: Stage, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        CapacityPool("mail", 2).cast(stage.idle, **options)
    with pytest.raises(InvalidValueError, match="takes a task"):
        CapacityPool("mail", 2).cast(stage.idle.s() | stage.idle.s())
    with pytest.raises(InvalidValueError, match="no option of a call"):
        stage.idle.apply_async(capacity=CapacityPool("mail", 2))
    assert stage.row_counts()["jobs"] == stage.row_counts()["capacity_pools"] == 0


def test_tasks_without_rows_are_refused(stage: Stage) -> None:
    with pytest.raises(SettingsError, match="capacity is a CapacityPool, not 7"):
        stage.task(nothing, name="stage.wrong", capacity=7)
    with pytest.raises(SettingsError, match=r"capacity= of plain needs rows"):
        stage.app.task(plain, name="plain", capacity=CapacityPool("mail", 1), shared=False).delay()


def plain() -> None:
    """A plain task."""


# -- in a run, in another's transaction, with lost answers -------------------------------------------------------------


def test_a_run_is_refused_at_the_call_by_what_it_will_have_made(stage: Stage) -> None:
    pool = CapacityPool("mail", 2)
    limited = task_of(stage, pool)
    seen: list[int] = []

    def body(job: RunningJob) -> None:
        job.enqueue(limited, child_name="a")
        job.enqueue(limited, child_name="b")
        with pytest.raises(Overloaded):
            job.enqueue(limited, child_name="c")
        seen.append(pool.used)

    limited.enqueue().terminate()
    stage.drain()
    parent = stage.inside(body)
    assert (seen, pool.used, sorted(parent.children)) == ([0], 2, ["a", "b"])


def test_a_run_begins_again_if_the_pool_has_filled_up(stage: Stage) -> None:
    pool = CapacityPool("mail", 1)
    limited = task_of(stage, pool)
    limited.enqueue().terminate()
    stage.drain()
    refused: list[bool] = []

    def body(job: RunningJob) -> None:
        try:
            job.enqueue(limited, child_name="a")
        except Overloaded:
            refused.append(True)
            return
        stage.outside(limited.enqueue)

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert "has filled up meanwhile" in stage.ignored[job.id]
    assert stage.run(job) == "completed"
    assert (refused, pool.used, stage.sql("SELECT losses FROM jobs WHERE id = %s", job.id)) == ([True], 1, [(0,)])


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_callers_transaction_takes_its_slot_at_the_commit_and_holds_up_nobody(stage: Stage, ends: str) -> None:
    pool = CapacityPool("mail", 1)
    limited = task_of(stage, pool)
    with LENDERS["psycopg"](stage.database_url) as lender:
        made = limited.enqueue(transaction=lender.transaction)
        with pytest.raises(Overloaded):
            limited.enqueue(transaction=lender.transaction)
        other = limited.enqueue()
        getattr(lender, ends)()
    assert (slots(stage), held(stage)) == ([(1, 1, 0)], 1)
    assert stage.run(other) == "completed"
    assert (slots(stage), held(stage)) == ([(1, 2, 1)] if ends == "commit" else [(0, 1, 1)], pool.used)
    if ends == "commit":
        assert stage.run(made) == "completed"


def test_a_call_without_bounds_in_the_callers_transaction_is_counted_at_the_commit(stage: Stage) -> None:
    pool = CapacityPool("mail", 2, shards=2)
    task_of(stage, pool).enqueue()
    with LENDERS["psycopg"](stage.database_url) as lender:
        made = [
            pool.apply_async(stage.idle, weight=weight, bounded=False, transaction=lender.transaction).job
            for weight in (1, 2)
        ]
        limited = pool.apply_async(stage.idle).job
        assert pool.used == 2
        lender.commit()
    assert (pool.used, held(stage), [job.refresh().waiting_for for job in made]) == (5, 5, [[], []])
    assert [stage.run(job) for job in (*made, limited)] == ["completed"] * 3
    assert pool.used == held(stage) == 1


@pytest.mark.parametrize("named", [[], ["one"]], ids=["one statement", "several"])
def test_a_call_whose_answer_was_lost_takes_one_slot(stage: Stage, at: Arm, named: list[str]) -> None:
    pool = CapacityPool("mail", 2)
    limited = task_of(stage, pool)
    at("enqueue:after-commit", lost)
    assert limited.enqueue(aliases=named).exists
    assert (slots(stage), held(stage)) == ([(1, 1, 0)], 1)


# -- at once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_of_many_threads_exactly_the_limit_is_admitted(stage: Stage, shards: int) -> None:
    pool = CapacityPool("mail", 8, shards=shards)
    limited = task_of(stage, pool)
    for _ in range(3):
        start, found = threading.Barrier(24), list[bool]()

        def ask(start: threading.Barrier = start, found: list[bool] = found) -> None:
            start.wait()
            try:
                limited.enqueue()
                found.append(True)
            except Overloaded:
                found.append(False)

        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(found), sum(found), pool.used, held(stage)) == (24, 8, 8, 8)
        assert stage.sql("SELECT count(*) FROM capacity_shards WHERE used > capacity") == [(0,)]
        stage.drain()
        assert pool.used == 0


READY_S = patient(60)
"""Seconds in which eight processes start; at a load of 20 a minute is too short."""


def client(url: str, number: int, start: Any, rounds: int, answers: Any) -> None:
    """One of several processes with fifty clients, who ask at once in each round, over twelve connections."""
    app = make_app(f"client{number}", sidejob_database_url=url)
    limited = app.sidejob.task(nothing, name="stage.limited", capacity=CapacityPool("mail", 8))

    def ask(_: int) -> list[int]:
        try:
            return [limited.enqueue().id]
        except Overloaded:
            return []

    with ThreadPoolExecutor(12) as clients:
        for _ in range(rounds):
            start.wait(READY_S)
            answers.put([job_id for found in clients.map(ask, range(50)) for job_id in found])
            start.wait(READY_S)  # until the round was looked at
    app.sidejob.close()


@pytest.mark.few(0)
@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_of_400_clients_in_8_processes_exactly_8_are_admitted(stage: Stage, rounds: int) -> None:
    """After each round the jobs are terminated, and the counter is back at 0."""
    pool = CapacityPool("mail", 8)
    task_of(stage, pool)
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(9), context.Queue()
    processes = [
        context.Process(target=client, args=(stage.database_url, number, start, rounds, answers), daemon=True)
        for number in range(8)
    ]
    for process in processes:
        process.start()
    try:
        for _ in range(rounds):
            start.wait(READY_S)
            admitted = [job_id for _ in processes for job_id in answers.get(timeout=READY_S)]
            assert (len(admitted), pool.used, held(stage)) == (8, 8, 8)
            stage.sql("DELETE FROM jobs WHERE id = ANY(%s)", admitted)
            assert pool.used == 0
            start.wait(READY_S)
        for process in processes:
            process.join(READY_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_count_events_when_they_happen(stage: Stage) -> None:
    pool = CapacityPool("mail", 2)
    limited = task_of(stage, pool)
    none = {"total": 0, "last_60s": 0}
    assert pool.stats() == {"limit": 2, "used": 0, "in": none, "out": none, "refused": none}
    for _ in range(2):
        limited.enqueue()
    with pytest.raises(Overloaded):
        limited.enqueue()
    stage.drain()
    sample = CapacitySamples(Sweep(stage.runtime))
    wait_until(lambda: pool.stats()["refused"]["total"] == 1, message="the refusal to be counted")
    one, two = {"total": 1, "last_60s": 1}, {"total": 2, "last_60s": 2}
    assert pool.stats() == {"limit": 2, "used": 0, "in": two, "out": two, "refused": one}
    assert sample.run_once()["pools_sampled"] == 1
    assert sample.run_once()["pools_sampled"] == 0, "it has not moved"
    stage.sql("UPDATE capacity_samples SET taken_at = now() - interval '61 s'")
    limited.enqueue()
    assert pool.stats()["in"] == {"total": 3, "last_60s": 1}
    assert pool.stats()["refused"] == {"total": 1, "last_60s": 0}
    sample.run_once()
    assert stage.row_counts()["capacity_samples"] == 2
    stage.sql("UPDATE capacity_samples SET taken_at = taken_at - interval '61 s'")
    sample.run_once()
    assert stage.row_counts()["capacity_samples"] == 1, "what is older than the window is of no use"
    assert pool.stats()["in"] == {"total": 3, "last_60s": 0}


def test_retry_after_follows_how_fast_slots_are_freed(stage: Stage) -> None:
    pool = CapacityPool("mail", 30)
    for _ in range(30):
        pool.cast(stage.idle)
    stage.drain()
    stage.sql("UPDATE capacity_pools SET created_at = now() - interval '1 day'")
    pool.cast(stage.idle, weight=30)
    with pytest.raises(Overloaded) as refused:
        pool.cast(stage.idle, weight=3)
    assert 5.5 <= refused.value.retry_after <= 6.5  # 30 in a minute: three in six seconds


def test_who_waited_behind_a_heavier_one_is_let_in_when_that_is_terminated(stage: Stage) -> None:
    pool = CapacityPool("mail", 2)
    pool.cast(stage.idle)
    heavy, light = (pool.apply_async(stage.idle, on_full="wait", weight=weight).job for weight in (2, 1))
    assert held(stage) == 1
    heavy.terminate()
    assert stage.run(heavy) == "terminated"
    stage.sidejob.poll()
    assert held(stage) == 2
    assert stage.run(light) == "completed"


# -- against a counter -------------------------------------------------------------------------------------------------


def test_a_pool_does_what_a_counter_would(stage: Stage) -> None:
    """Clients, runs, wakes, deaths and deletions in any order: the counter is true, and nobody waits beside a slot."""

    class Counter(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            stage.sql("DELETE FROM jobs")
            stage.sql("DELETE FROM capacity_pools")
            stage.worker_id = stage.new_worker()
            self.pool = CapacityPool("mail", 4, shards=2)
            other = CapacityPool("post", 2)
            for pool in (self.pool, other):
                declare(pool, stage.runtime)
            self.tasks = [task_of(stage, pool, name=f"stage.{pool.name}") for pool in (self.pool, other)]
            self.jobs: dict[int, int] = {}
            """The weight of each job."""

        def shards(self, pool: str = "mail") -> list[tuple[int, int]]:
            return stage.sql("SELECT used, capacity FROM capacity_shards WHERE pool = %s", pool)

        def has_slot(self, job_id: int) -> bool:
            return stage.sql("SELECT pool_shard IS NOT NULL FROM messages WHERE job_id = %s", job_id) == [(True,)]

        def drawn(self, data: Any) -> Job:
            return Job(data.draw(st.sampled_from(sorted(self.jobs))), runtime=stage.runtime)

        @rule(
            weight=st.sampled_from([1, 1, 2]), mode=st.sampled_from(["drop", "wait", "exceed"]), of_task=st.booleans()
        )
        def asks(self, weight: int, mode: str, of_task: bool) -> None:
            has_room = any(used + weight <= capacity for used, capacity in self.shards())
            how: dict[str, Any] = {"bounded": False} if mode == "exceed" else {"on_full": mode}
            result = self.pool.apply_async(self.tasks[0] if of_task else stage.idle, weight=weight, **how)
            assert (result is not None) == (has_room or mode != "drop")
            if result is not None:
                self.jobs[result.job.id] = weight
                assert self.has_slot(result.job.id) or mode == "wait"

        @precondition(lambda self: self.jobs)
        @rule(data=st.data())
        def runs(self, data: Any) -> None:
            job = self.drawn(data)
            has_slot = self.has_slot(job.id)
            hold = stage.claim(job)
            assert (hold is not None) == has_slot
            if hold is not None:
                stage.perform(hold)
                assert not self.has_slot(job.id)

        @precondition(lambda self: self.jobs)
        @rule(data=st.data(), force=st.booleans())
        def wakes(self, data: Any, force: bool) -> None:
            self.drawn(data).run(force=force)

        @precondition(lambda self: self.jobs)
        @rule(data=st.data())
        def dies(self, data: Any) -> None:
            dead = stage.new_worker()
            if stage.claim(self.drawn(data), worker_id=dead):
                stage.declare_dead(dead)
                stage.sidejob.poll()

        @precondition(lambda self: self.jobs)
        @rule(data=st.data(), where=st.integers(0, 1))
        def moves(self, data: Any, where: int) -> None:
            job = self.drawn(data)
            before = job.info["pool"]
            after = job.move(task=self.tasks[where]).info["pool"]
            if before != after:  # otherwise it has stayed, as its call has named the pool
                assert after == self.tasks[where].capacity.name
                self.jobs[job.id] = 1
            capacity.fill(stage.runtime)  # as the sweeper does: lighter ones may have waited behind it

        @precondition(lambda self: self.jobs)
        @rule(data=st.data())
        def goes(self, data: Any) -> None:
            job = self.drawn(data)
            job.terminate()
            assert (stage.run(job), job.delete()) == ("terminated", True)
            del self.jobs[job.id]
            capacity.fill(stage.runtime)  # as the sweeper does: lighter ones may have waited behind it

        @rule(limit=st.integers(4, 7))
        def is_resized(self, limit: int) -> None:
            self.pool.resize(limit)

        @invariant()
        def counts(self) -> None:
            rows = stage.sql("SELECT job_id, pool, pool_weight FROM messages WHERE pool_shard IS NOT NULL")
            assert all(self.jobs[job_id] == weight for job_id, _, weight in rows)
            for name in ("mail", "post"):
                assert sum(used for used, _ in self.shards(name)) == sum(weight for _, of, weight in rows if of == name)
            assert sum(capacity for _, capacity in self.shards()) == self.pool.limit

        @invariant()
        def nobody_waits_beside_a_slot(self) -> None:
            first = stage.sql(
                "SELECT DISTINCT ON (pool) pool, pool_weight FROM messages"
                f" WHERE gate = {Gate.POOL} ORDER BY pool, due_at, job_id"
            )
            for name, weight in first:
                assert all(used + weight > capacity for used, capacity in self.shards(name))

    run_state_machine_as_test(
        Counter,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.fixture(autouse=True)
def no_pools_left(stage: Stage) -> Iterator[None]:
    """Each test ends with a true counter."""
    yield
    for (name,) in stage.sql("SELECT name FROM capacity_pools"):
        assert sum(used for used, _, _ in slots(stage, name)) == held(stage, name)

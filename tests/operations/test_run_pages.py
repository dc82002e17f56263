"""Runs that a worker claims before their processes begin them, and whose ends it writes, many in one statement."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from threading import Thread
from typing import Any

import psycopg
import pytest

from celery_sidejob import CapacityPool, Job, RunningJob
from celery_sidejob.model.changes import SetState
from celery_sidejob.model.errors import LeaseLostError
from celery_sidejob.model.loss import Loss
from celery_sidejob.operations.hold import Hold
from celery_sidejob.operations.runs import recovery, run_pages, runs
from celery_sidejob.operations.runs.run_pages import Claimed
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.store import claims
from celery_sidejob.store.claims import Owed
from celery_sidejob.store.connection.turns import LONGEST_TURN_S, take_turns
from celery_sidejob.store.errors import RowsLocked
from celery_sidejob.store.outbox import doorbells, holds
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.results import Ended
from celery_sidejob.store.statement import Transaction
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import PgBouncer


@pytest.fixture
def stage(database_url: str) -> Iterator[Stage]:
    made = Stage(database_url, task_ignore_result=True)
    yield made
    made.close()


def nothing(job: RunningJob) -> None:
    """A body."""


def owed(stage: Stage, *jobs: Job) -> list[Owed]:
    """The runs that these jobs' messages announce."""
    return [
        Owed(row.job_id, row.for_run, row.task)
        for row in doorbells.waiting(stage.runtime.connections, [job.id for job in jobs])
    ]


def claim(stage: Stage, *jobs: Job, worker_id: int | None = None) -> dict[int, Claimed]:
    """Claim what these jobs are owed, in one page, by job."""
    worker_id = worker_id or stage.worker_id
    found, _ = run_pages.claim_page(stage.runtime, owed(stage, *jobs), worker_id=worker_id, over=())
    return {job_id: claimed for (job_id, _), claimed in found.items()}


def begun(stage: Stage, claimed: Claimed) -> Hold:
    """Begin in another process what was claimed."""
    hold = run_pages.begin(stage.runtime, pickle.loads(pickle.dumps(claimed)))
    assert hold is not None
    return hold


def end(stage: Stage, *runs: Ended, worker_id: int | None = None) -> set[int]:
    """End runs in a page; returns the jobs of those that have ended."""
    _, ended = run_pages.claim_page(stage.runtime, (), worker_id=worker_id or stage.worker_id, over=runs)
    return {row.id for row in ended}


def perform(stage: Stage, claimed: Claimed) -> list[Any]:
    """Run what was claimed; returns what its process tells the worker of an end that it has left."""
    return stage.leave(begun(stage, claimed))


def test_a_page_claims_what_nobody_has_begun_and_leaves_everything_else(stage: Stage) -> None:
    stage.sidejob.queue("managed").configure(limit=5)
    paced = stage.task(nothing, name="paced", run_rate="5/s")
    precious = stage.task(nothing, name="precious", max_losses=1)
    pooled = stage.task(nothing, name="pooled", capacity=CapacityPool("pool", 5))
    fresh, child = stage.job(), stage.job(parent=stage.job(), child_name="child")
    taken, ends, lost, late = stage.job(), stage.job(), stage.job(), stage.job()
    left = [
        stage.job(queue="managed"),
        stage.sidejob.enqueue(paced),
        stage.sidejob.enqueue(pooled),
        stage.sidejob.enqueue(precious),
        taken,
        ends,
        lost,
        late,
    ]
    assert stage.claim(taken)
    stage.claim(ends)
    ends.terminate()
    stage.perform(stage.holds[ends.id])
    hold = stage.claim(lost)
    assert hold
    recovery.rescue(stage.runtime, lost.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True, loss=Loss())
    stage.sql("UPDATE messages SET due_at = now() + interval '1 hour' WHERE job_id = %s", late.id)

    found = claim(stage, fresh, child, *left)

    assert set(found) == {fresh.id, child.id}
    assert stage.sql("SELECT DISTINCT locked_pid FROM messages WHERE job_id IN (%s, %s)", fresh.id, child.id) == [
        (None,)
    ]
    assert {fresh.refresh().status, child.refresh().status} == {"running"}


def test_a_page_does_not_lock_the_job_of_a_managed_queue(stage: Stage) -> None:
    """The gate of its queue chooses the best job that is not locked: it would pass over this one."""
    stage.sidejob.queue("managed").configure(limit=1)
    fresh, gated = stage.job(), stage.job(queue="managed")
    announced = owed(stage, fresh, gated)
    free: list[int] = []

    def work(executor: Transaction) -> None:
        claims.claim_page(executor, announced, worker_id=stage.worker_id, max_losses=3, most=10, schema=None)
        found = stage.sql("SELECT id FROM jobs WHERE id IN (%s, %s) FOR UPDATE SKIP LOCKED", fresh.id, gated.id)
        free.extend(job_id for (job_id,) in found)

    stage.runtime.connections.transact("claim-page", work)
    assert free == [gated.id]


def test_a_page_has_the_children_of_each_job(stage: Stage) -> None:
    parents = [stage.job() for _ in range(2)]
    children = [[stage.job(parent=parent, child_name=name) for name in "ab"] for parent in parents]
    found = claim(stage, *parents, *children[0])
    assert len(found) == 4
    for parent, family in zip(parents, children, strict=True):
        hold = begun(stage, found[parent.id])
        assert [row.id for row in hold.children or ()] == [child.id for child in family]
        assert hold.row.task_id == parent.task_id
    assert begun(stage, found[children[0][0].id]).children == []


def test_of_two_workers_one_has_the_run(stage: Stage) -> None:
    job, other = stage.job(), stage.new_worker()
    announced = owed(stage, job)
    found = [
        run_pages.claim_page(stage.runtime, announced, worker_id=worker_id, over=())[0]
        for worker_id in (stage.worker_id, other)
    ]
    assert [len(one) for one in found] == [1, 0]


def test_a_worker_that_was_declared_dead_claims_nothing(stage: Stage) -> None:
    dead = stage.new_worker()
    stage.declare_dead(dead)
    assert claim(stage, stage.job(), worker_id=dead) == {}


def test_a_page_waits_for_no_job_that_a_transaction_has_locked(stage: Stage) -> None:
    begins, ends, free = stage.job(), stage.job(), stage.job()
    told = perform(stage, claim(stage, ends)[ends.id])
    with psycopg.connect(stage.database_url) as user:
        user.execute(f"SELECT FROM {SCHEMA}.jobs WHERE id = ANY(%s) FOR UPDATE", [[begins.id, ends.id]])
        assert set(claim(stage, begins, free)) == {free.id}
        assert end(stage, *told) == set()
    assert end(stage, *told) == {ends.id}
    assert set(claim(stage, begins)) == {begins.id}


def test_a_page_waits_for_anything_else_no_longer_than_a_turn_through_a_proxy_too(
    stage: Stage, pgbouncer: PgBouncer
) -> None:
    """All services of the worker take turns on its connection, and the sessions of a proxy have no limit of ours."""
    pooled = Stage(pgbouncer.url_of(stage.database_url), task_ignore_result=True)
    job, refused = pooled.job(), []

    def claim_in_turn() -> None:
        take_turns()
        with pytest.raises(RowsLocked) as raised:
            claim(pooled, job)
        refused.append(raised.value)

    with psycopg.connect(stage.database_url) as user:
        user.execute(f"SELECT FROM {SCHEMA}.messages FOR UPDATE")
        service = Thread(target=claim_in_turn, daemon=True)
        service.start()
        service.join(LONGEST_TURN_S + 60)
        assert len(refused) == 1
    pooled.close()


def test_an_end_in_a_page_is_as_one_of_its_process(stage: Stage) -> None:
    paged, alone = stage.job(), stage.job()
    told = perform(stage, claim(stage, paged)[paged.id])
    assert (told, paged.refresh().status) == ([((paged.id, 1, "null"), None)], "running")
    assert end(stage, *told) == {paged.id}
    assert end(stage, *told) == set(), "it is over"
    stage.run(alone)
    kept = "status, run_no, ended_run, changes, wakes_taken, unit_no, worker_id, run_kind, losses, retries, started"
    assert stage.sql(f"SELECT DISTINCT {kept} FROM jobs") == [("completed", 1, 1, 3, 0, None, None, None, 0, 0, True)]
    assert stage.sql("SELECT DISTINCT outcome, result::text, closed_at IS NULL, stored_at IS NULL FROM askings") == [
        ("completed", "null", False, False)
    ]
    assert [[one.what for one in job.history] for job in (paged, alone)] == [["made", "claimed", "completed"]] * 2
    assert stage.sql("SELECT FROM messages") == []


def test_an_end_that_leaves_more_to_be_written_is_none_of_a_page(stage: Stage) -> None:
    asked, timed, followed, terminated = jobs = [stage.job() for _ in range(4)]
    found = claim(stage, *jobs)
    told = [run for job in jobs for run in perform(stage, found[job.id])]
    assert len(told) == 4
    asked.run()
    timed.run(countdown=60)
    stage.job(depends_on=[followed])
    terminated.terminate()

    assert end(stage, *told) <= {timed.id}
    for job in jobs:
        if job.refresh().status in ("running", "queued", "terminating"):
            hold = found[job.id].hold()
            if stage.sql("SELECT unit_no FROM jobs WHERE id = %s", job.id) == [(0,)]:
                run_pages.end_alone(stage.runtime, hold, "null", is_unknown=False)
    assert asked.refresh().status == "queued"
    assert followed.refresh().status == "completed"
    assert terminated.refresh().status == "terminating"
    stage.drain()
    assert {job.refresh().status for job in jobs} == {"completed", "terminated", timed.refresh().status}


@pytest.mark.parametrize("does", ["writes", "returns", "reads", "has a parent"])
def test_a_process_leaves_no_end_that_has_more_to_write(stage: Stage, does: str) -> None:
    bodies = {
        "writes": lambda job: job.set(a=1),
        "returns": lambda job: None,
        "reads": lambda job: job.input("in").read(),
        "has a parent": lambda job: None,
    }
    job = stage.job(bodies[does], **({"parent": stage.job(), "child_name": "a"} if does == "has a parent" else {}))
    if does == "reads":
        job.input("in").write(1)
    told = perform(stage, claim(stage, job)[job.id])
    assert bool(told) == (does == "returns")
    assert job.refresh().status == ("running" if told else "completed")


def test_a_run_that_was_taken_from_its_worker_does_not_begin_unasked_nor_end(stage: Stage) -> None:
    """The worker was frozen, or declared dead, between its claim and the begin of the run."""
    job = stage.job()
    claimed = claim(stage, job)[job.id]
    doubtful = claimed._replace(stands=False)
    assert run_pages.begin(stage.runtime, doubtful) is not None
    told = perform(stage, claimed)
    stage.declare_dead(stage.worker_id)
    [held] = holds.held_by(stage.runtime.connections, JOBS, stage.worker_id)
    assert recovery.rescue(
        stage.runtime, job.id, run_no=held.number, worker_id=stage.worker_id, has_begun=held.pid is not None
    )
    assert run_pages.begin(stage.runtime, doubtful) is None
    assert end(stage, *told) == set()
    with pytest.raises(LeaseLostError):
        run_pages.end_alone(stage.runtime, claimed.hold(), "null", is_unknown=False)
    stage.worker_id = stage.new_worker()
    assert stage.sql("SELECT status, losses FROM jobs") == [("queued", 0)]
    assert claim(stage, job) == {}, "its process claims it, so that its death counts"
    assert stage.run(job) == "completed"


def test_a_run_that_has_committed_a_unit_has_begun(stage: Stage) -> None:
    job = stage.job()
    hold = begun(stage, claim(stage, job)[job.id])
    runs.commit(stage.runtime, hold, Unit([SetState(job.id, {"a": "1"})]))
    assert recovery.rescue(stage.runtime, job.id, run_no=1, worker_id=hold.worker_id, own=True, has_begun=False)
    assert stage.sql("SELECT status, losses FROM jobs") == [("queued", 1)]


def test_a_run_that_is_given_back_before_it_begins_leaves_no_trace(stage: Stage) -> None:
    job = stage.job()
    [announced] = owed(stage, job)
    claim(stage, job)
    assert recovery.undo(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id)
    assert stage.sql("SELECT status, run_no, losses, unit_no FROM jobs") == [("queued", 0, 0, None)]
    assert [one.what for one in job.history] == ["made"]
    assert owed(stage, job) == [announced], "its message is valid again"
    other = stage.new_worker()
    assert set(claim(stage, job, worker_id=other)) == {job.id}
    assert not recovery.undo(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id), "it is the other worker's"


def test_an_end_whose_answer_was_lost_is_recognised(stage: Stage) -> None:
    job = stage.job()
    claimed = claim(stage, job)[job.id]
    told = perform(stage, claimed)
    assert end(stage, *told) == {job.id}
    run_pages.end_alone(stage.runtime, claimed.hold(), "null", is_unknown=True)
    with pytest.raises(LeaseLostError):
        run_pages.end_alone(stage.runtime, claimed.hold(), "null", is_unknown=False)

"""An open transaction of somebody else is no outage, and holds up calls and ends of runs for a bounded time only."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from celery.app.trace import build_tracer

from celery_sidejob import CapacityPool, RunningJob, StoreUnavailableError, extension
from celery_sidejob.model.durable import DIGEST, HEADER, WORKER, Digest, digest_of
from celery_sidejob.operations import stores
from celery_sidejob.store import jobs
from celery_sidejob.store.errors import RowsLocked
from tests.tools.in_process import Stage

LEASE_S = 0.6


@pytest.fixture
def hasty(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage on which nobody waits for long."""
    monkeypatch.setattr(extension, "SHORTEST_PAUSE_S", 0.2)
    monkeypatch.setattr(stores, "LONGEST_WAIT_S", 2.0)
    made = Stage(stage.database_url, sidejob_lease=LEASE_S, sidejob_heartbeat_interval=0.2)
    yield made
    made.close()


class Shared:
    """What a transaction of a client's and a run both use."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.job = stage.job()
        self.batch = stage.sidejob.batch("shared")

    def call_in_batch(self, transaction: Any) -> None:
        """Call in the block of the batch, which an error leaves open."""
        with suppress(ZeroDivisionError), self.batch:
            self.stage.sidejob.enqueue(self.stage.idle, transaction=transaction)
            raise ZeroDivisionError


HELD: dict[str, tuple[Callable[[Shared, Any], Any], Callable[[Shared, RunningJob], Any]]] = {
    "an alias": (
        lambda shared, tx: shared.stage.sidejob.enqueue(shared.stage.idle, aliases=["same"], transaction=tx),
        lambda shared, job: job.add_alias("same"),
    ),
    "a unique key": (
        lambda shared, tx: shared.stage.sidejob.enqueue(shared.stage.idle, unique="same", transaction=tx),
        lambda shared, job: job.enqueue(shared.stage.idle, child_name="one", unique="same"),
    ),
    "a key of a state": (
        lambda shared, tx: shared.job.set({"key": 1}, transaction=tx),
        lambda shared, job: shared.job.set({"key": 2}),
    ),
    "a parent": (
        lambda shared, tx: shared.stage.sidejob.enqueue(
            shared.stage.idle, parent=shared.job, child_name="one", transaction=tx
        ),
        lambda shared, job: job.adopt(shared.job, "adopted"),
    ),
    "a batch": (lambda shared, tx: shared.call_in_batch(tx), lambda shared, job: shared.batch.close()),
}


@pytest.mark.parametrize("what", HELD)
def test_an_end_waits_for_an_open_transaction_for_a_lease_and_its_run_begins_again(hasty: Stage, what: str) -> None:
    holds, needs = HELD[what]
    shared = Shared(hasty)
    runs: list[int] = []

    def body(job: RunningJob) -> None:
        runs.append(job.run_no)
        if what != "an alias" or len(runs) == 1:  # the transaction has it for good
            needs(shared, job)

    job = hasty.job(body)
    with hasty.connect(autocommit=False) as transaction:
        transaction.execute("SELECT 1")
        holds(shared, transaction)
        began = time.monotonic()
        assert hasty.run(job) == "queued"
        assert time.monotonic() - began < 10 * LEASE_S
        assert re.search("has been locked for too long|needs a lock that", hasty.ignored[job.id])
        transaction.commit()
    assert hasty.run(job) == "completed"
    assert (runs, hasty.sql("SELECT losses FROM jobs WHERE id = %s", job.id)) == ([1, 2], [(0,)])


def noted() -> None:
    """The body of a durable task."""


@pytest.mark.parametrize("on_store_down", ["error", "publish"])
def test_a_call_that_meets_a_lock_fails_alone(hasty: Stage, on_store_down: str) -> None:
    """Its store answers: other calls are made there at once, and no call goes to the broker without a row."""
    hasty.app.conf.sidejob_on_store_down = on_store_down
    task = hasty.app.task(noted, name="noted", durable=True, shared=False)
    limited = hasty.app.task(noted, name="limited", durable=True, shared=False, capacity=CapacityPool("mail", 2))
    limited.delay()
    with hasty.connect(autocommit=False) as transaction:
        transaction.execute("SELECT FROM capacity_shards FOR UPDATE")
        task.apply_async(task_id="same", transaction=transaction)
        for call in (limited.delay, lambda: task.apply_async(task_id="same")):
            with pytest.raises(StoreUnavailableError, match="has been locked for too long"):
                call()
            task.delay()
        transaction.commit()
    limited.delay()
    assert hasty.sql("SELECT count(*) FROM messages") == [(5,)]


def test_a_job_that_waits_for_a_lock_does_not_keep_the_sweeper_from_the_others(hasty: Stage) -> None:
    """Who makes a job in a transaction of psycopg leaves it to the sweeper to look whether that still waits."""
    locked, other = hasty.job(), hasty.job()
    with hasty.connect(autocommit=False) as holder, hasty.connect(autocommit=False) as caller:
        holder.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [locked.id])  # as a unit that is not committed yet
        waits = hasty.sidejob.enqueue(hasty.idle, depends_on=[locked])
        hasty.sidejob.enqueue(hasty.idle, depends_on=[other], transaction=caller)
        hasty.run(other)
        caller.commit()
        hasty.sidejob.poll()
        assert hasty.sql("SELECT id FROM jobs WHERE blocked") == [(waits.id,)]
        holder.rollback()
    hasty.sidejob.poll()
    assert hasty.sql("SELECT state FROM dependencies") == [("kept",)]


def test_a_locked_row_is_not_taken_for_a_silent_store(stage: Stage) -> None:
    job = stage.job()
    with stage.connect(autocommit=False) as transaction:
        transaction.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [job.id])
        with pytest.raises(RowsLocked):
            stage.runtime.connections.transact("lock", lambda executor: jobs.lock(executor, [job.id]), within_s=3.0)


@pytest.mark.parametrize("how", ["retry", "replace"])
def test_a_task_that_cannot_go_on_for_a_lock_begins_again(hasty: Stage, how: str) -> None:
    """It leaves a pool whose shard is locked. It has not failed, and is not in the dead set."""
    quick = {"sidejob_lease": LEASE_S, "sidejob_heartbeat_interval": 0.2}
    stage = Stage(hasty.database_url, sidejob_queues={"limited": {"pool": CapacityPool("mail", 1)}}, **quick)
    other = stage.app.task(noted, name="noted", durable=True, shared=False)

    def goes_on(self: Any) -> None:
        if not holder.closed:
            holder.execute("SELECT FROM capacity_shards FOR UPDATE")
        raise self.retry(countdown=0, queue="elsewhere") if how == "retry" else self.replace(other.s())

    task = stage.app.task(goes_on, name="goes_on", bind=True, durable=True, on_lost="requeue", shared=False)
    task_id = task.apply_async(queue="limited").id
    ((publication, content),) = stage.sql("SELECT publication, body FROM messages")
    request = json.loads(json.loads(publication)["about"])["headers"] | {
        "delivery_info": {"routing_key": "limited"}, "is_eager": False, HEADER: {"v": 1, "n": 1},
        DIGEST: Digest(digest_of(bytes(content))), WORKER: [(0, stage.worker_id)],
    }  # fmt: skip
    with stage.connect(autocommit=False) as holder:
        build_tracer(task.name, task, app=stage.app)(task_id, (), {}, request)
        row = "SELECT generation, losses, locked_by, doom, pool FROM messages"
        assert stage.sql(row) == [(1, 0, None, None, "mail")]
    assert len(stage.sidejob.dead) == 0
    build_tracer(task.name, task, app=stage.app)(task_id, (), {}, request)
    assert stage.sql("SELECT generation, pool FROM messages") == [(2, None)]
    stage.close()

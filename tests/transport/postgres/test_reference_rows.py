"""What the statements of the outbox put into the queues of the broker that is their store, and what a worker is given.

No worker runs: the test looks into the tables, and takes messages as a worker's consumer does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy
from kombu import Connection

from celery_sidejob.hooks.tasks.durable_run import is_first
from celery_sidejob.hooks.worker import holding
from celery_sidejob.model.durable import REPUBLISHED, Message, Terms
from celery_sidejob.operations.ledger import burials, durable_ends, durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.services.heartbeat.run_ends import QuietEnds
from celery_sidejob.store.broker.holds import NOBODY, Holder
from celery_sidejob.store.outbox import references
from tests.tools.contents import content_of
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until
from tests.transport.consuming import Consuming

LOST_AFTER_S = 600.0
SENT = "SELECT task_id, generation, priority, due_at IS NULL, again FROM broker_messages ORDER BY id"


@pytest.fixture
def shop(database_url: str) -> Iterator[Stage]:
    """An app whose broker is its store, with a durable task."""
    made = Stage(
        database_url, broker="sidejobpg://", sidejob_durable_tasks=["once"], sidejob_lost_after=LOST_AFTER_S,
        task_ignore_result=True,
    )  # fmt: skip

    @made.app.task(name="once", shared=False)
    def once(number: int = 0) -> None:
        pass

    yield made
    made.close()


@pytest.fixture
def reading(shop: Stage, connect: Callable[..., Connection]) -> Consuming:
    """A consumer that reads what references lead to, as a worker of the app does."""
    connection = connect()
    consuming = Consuming(connection, "celery", prefetch=8)
    connection.transport.outbox = Reading(shop)
    return consuming


class Reading:
    """The outbox of a connection that holds no rows."""

    is_busy = False

    def __init__(self, shop: Stage) -> None:
        self.compose = partial(holding.message_of, shop.app)
        self.with_ends = QuietEnds("ends", lambda page: None, lambda end: None).go_with

    def asks(self) -> Holder:
        return NOBODY


def begun(shop: Stage, task_id: str) -> Run:
    """A task that was called, and locked for its run."""
    shop.app.send_task("once", task_id=task_id)
    run = Run((task_id, 1), "once", shop.worker_id, shop.runtime, content_of(shop.runtime, task_id))
    assert durable_runs.begin(shop.runtime, run, terms=Terms(os.getpid(), "dead", 3), is_here=False)
    return run


def message_of(shop: Stage, task_id: str, **changes: Any) -> Message:
    """The message that the row has."""
    columns = "task_id, task, queue, publication, body, generation, priority"
    (found,) = shop.sql(f"SELECT {columns} FROM messages WHERE task_id = %s", task_id)
    fields = dict(zip(columns.split(", "), found, strict=True))
    return replace(Message(**{**fields, "body": bytes(fields["body"])}), **changes)


def test_each_call_puts_one_reference_into_its_queue(shop: Stage) -> None:
    shop.app.send_task("once", task_id="one", priority=3)
    shop.sidejob.send_many([shop.app.tasks["once"].s(number).set(task_id=f"many {number}") for number in range(2)])
    job = shop.job(priority=4)
    ((task_id,),) = shop.sql("SELECT task_id FROM messages WHERE job_id = %s", job.id)

    assert shop.sql(SENT) == [
        ("one", 1, 3, True, False), ("many 0", 1, 0, True, False), ("many 1", 1, 0, True, False),
        (task_id, 1, 4, True, False),
    ]  # fmt: skip


def test_the_sweeper_looks_for_what_was_sent_an_interval_later(shop: Stage) -> None:
    shop.app.send_task("once")
    shop.sidejob.send_many([shop.app.tasks["once"].s()])
    shop.job()

    late = f"next_check_at > now() + interval '{LOST_AFTER_S - 60} s'"
    assert shop.sql(f"SELECT {late}, published_at IS NOT NULL FROM messages") == [(True, True)] * 3


def test_the_run_after_a_run_of_before_the_change_of_the_broker_is_sent(shop: Stage) -> None:
    job = shop.job(lambda job: job.run())
    shop.sql("UPDATE messages SET priority = NULL, published_at = NULL; DELETE FROM broker_messages")
    shop.run(job)

    assert [(generation, priority) for _, generation, priority, *_ in shop.sql(SENT)] == [(2, 0)]


def test_a_retry_is_sent_unless_it_was_revoked_meanwhile(shop: Stage) -> None:
    for task_id in ("revoked", "retried"):
        run = begun(shop, task_id)
        if task_id == "revoked":
            burials.revoke(shop.runtime, [task_id])
        durable_ends.go_on(shop.runtime, run, message_of(shop, task_id))

    assert shop.sql("SELECT task_id FROM broker_messages WHERE generation = 2") == [("retried",)]
    assert shop.sql("SELECT task_id, published_at IS NOT NULL FROM messages ORDER BY 1") == [
        ("retried", True), ("revoked", False),
    ]  # fmt: skip


def test_work_that_does_not_wait_for_its_time_any_more_leaves_no_reference(shop: Stage) -> None:
    """Which would stay in its queue until that time."""
    shop.app.send_task("once", task_id="revoked", countdown=3600)
    shop.app.send_task("once", task_id="replaced", countdown=3600, unique="k")
    shop.app.send_task("once", task_id="expired", countdown=3600, expires=1800)
    shop.app.send_task("once", task_id="stays", countdown=3600)

    def retries(job: Any) -> None:
        raise job.retry(countdown=3600)

    moved, put_off, ended, forced = (shop.job(retries) for _ in range(4))
    for job in (moved, put_off, ended, forced):
        shop.run(job)
    shop.sql("DELETE FROM broker_messages WHERE due_at IS NULL")
    assert len(shop.sql(SENT)) == 8
    burials.revoke(shop.runtime, ["revoked"])
    shop.app.send_task("once", task_id="replaces", unique="k", on_duplicate="replace")
    shop.sql("UPDATE messages SET expires_at = now(), next_check_at = now() WHERE task_id = 'expired'")
    shop.sidejob.poll()
    moved.move(queue="new", countdown=0)
    put_off.move(countdown=7200)
    ended.terminate()
    forced.run()
    assert len(shop.sql("SELECT 1 FROM broker_messages WHERE task_id = %s", forced.task_id)) == 1, "it waits on"
    forced.run(force=True)

    waiting = shop.sql("SELECT task_id FROM broker_messages WHERE due_at IS NOT NULL")
    assert waiting == [("stays",)]
    assert shop.sql("SELECT queue, generation FROM broker_messages WHERE queue = 'new'") == [("new", 3)]


def test_what_runs_is_doomed_or_of_a_later_generation_is_not_sent_again(shop: Stage) -> None:
    begun(shop, "runs")
    for task_id in ("doomed", "later", "waits"):
        shop.app.send_task("once", task_id=task_id)
    burials.revoke(shop.runtime, ["doomed"])
    messages = [message_of(shop, task_id) for task_id in ("runs", "doomed", "later", "waits")]
    shop.sql("UPDATE messages SET generation = 2 WHERE task_id = 'later'; DELETE FROM broker_messages")

    shop.runtime.connections.transact("publish", lambda executor: references.send_tasks(executor, messages))

    assert shop.sql(SENT) == [("waits", 1, 0, True, True)]


def test_what_is_plainly_the_first(shop: Stage, reading: Consuming) -> None:
    """Not for what has waited for its time, was sent again, or came back from a worker."""
    for task_id in ("again", "came back", "first"):
        shop.app.send_task("once", task_id=task_id)
    shop.app.send_task("once", task_id="waited", countdown=3600)
    shop.sql("UPDATE broker_messages SET again = true WHERE task_id = 'again'")
    shop.sql("UPDATE broker_messages SET returns = 1 WHERE task_id = 'came back'")
    shop.sql("UPDATE broker_messages SET due_at = NULL WHERE task_id = 'waited'")
    reading.take(4)

    found = {one.headers["id"]: (one.headers, one.properties) for one in reading.messages}
    assert {
        task_id: is_first({**headers, "properties": properties, "delivery_info": properties["delivery_info"]})
        for task_id, (headers, properties) in found.items()
    } == {"again": False, "came back": False, "first": True, "waited": False}
    assert {task_id for task_id, (headers, _) in found.items() if headers.get(REPUBLISHED)} == {"again", "came back"}


def test_deaths_of_what_a_row_counts_hold_up_no_other_message(
    shop: Stage, reading: Consuming, connect: Callable[..., Connection]
) -> None:
    for task_id in ("one", "two"):
        shop.app.send_task("once", task_id=task_id)
    shop.sql("UPDATE broker_messages SET deaths = 1000, returns = 1000")
    reading.take(2)
    assert [one.headers["id"] for one in reading.messages] == ["one", "two"]


@pytest.mark.parametrize("calls", [1, 2])
def test_workers_are_rung_once_the_transaction_of_calls_is_committed(
    shop: Stage, database_url: str, calls: int
) -> None:
    rung: list[str] = []
    shop.runtime.publisher.ring_queues = rung.extend
    once = shop.app.tasks["once"]
    engine = sqlalchemy.create_engine(database_url.replace("postgresql:", "postgresql+psycopg:", 1))
    with engine.begin() as transaction:
        if calls == 1:
            once.apply_async(transaction=transaction)
        else:
            shop.sidejob.send_many([once.s(number) for number in range(calls)], transaction=transaction)
        assert (rung, shop.sql(SENT)) == ([], [])
    engine.dispose()

    wait_until(lambda: rung, message="the workers to be rung")
    assert (rung, len(shop.sql(SENT))) == (["celery"], calls)

"""Capacity pools of durable tasks: a message holds its slots from the call until the task is done."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery, chord, group
from celery.app.task import Context
from celery.exceptions import TimeoutError

from celery_sidejob import CapacityPool, InvalidValueError, Overloaded, StoreUnavailableError
from celery_sidejob.hooks.messages.kept_message import publication_of
from celery_sidejob.hooks.tasks import durable_run
from celery_sidejob.jobs.capacity import SlotHolder
from celery_sidejob.model.durable import ADOPTED, WORKER, Content, Message, Terms
from celery_sidejob.operations.ledger.burials import revoke
from celery_sidejob.store import workers
from celery_sidejob.store.outbox import holds
from celery_sidejob.store.statement import Statement
from celery_sidejob.testing.inline import run_until_quiet
from tests.acceptance.lenders import LENDERS
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm, lost

SLOTS = Statement("SELECT used, admitted, freed FROM {capacity_shards} WHERE pool = 'mail' ORDER BY shard")
HELD = Statement("SELECT coalesce(sum(pool_weight), 0) AS slots FROM {messages} WHERE pool_shard IS NOT NULL")
PUBLISHED = Statement("SELECT task_id, published_at IS NOT NULL AS published FROM {messages}")
CONTENT = Statement("SELECT task, encode(sha256(body), 'hex') AS digest FROM {messages} WHERE task_id = %(task_id)s")
UNLOCK = Statement("""
UPDATE {messages} SET locked_by = NULL, locked_at = NULL, locked_pid = NULL, next_check_at = now()
WHERE task_id = %(task_id)s""")
DUE = Statement("UPDATE {messages} SET next_check_at = now()")
ROWS = Statement("SELECT task_id FROM {messages} ORDER BY task_id")
END = Statement("DELETE FROM {messages} WHERE task_id = %(task_id)s")

POOL = CapacityPool("mail", 2)


def send_mail(to: str = "") -> None:
    """Send a mail."""


@pytest.fixture
def app(database_url: str) -> Iterator[Celery]:
    made = make_app("mail", result_backend="cache+memory://", sidejob_database_url=database_url)
    made.task(send_mail, name="mail", durable=True, capacity=POOL, shared=False)
    made.task(send_mail, name="other", durable=True, shared=False)
    made.task(send_mail, name="plain", shared=False)
    yield made
    made.sidejob.close()
    made.close()


def slots(app: Celery) -> list[tuple[int, int, int]]:
    return [tuple(row) for row in app.sidejob.runtime.connections.run(SLOTS)]


def held(app: Celery) -> int:
    return int(app.sidejob.runtime.connections.run(HELD)[0].slots)


def kept(app: Celery) -> list[str]:
    return [row.task_id for row in app.sidejob.runtime.connections.run(ROWS)]


def call(app: Celery, task_id: str, **options: Any) -> Any:
    return app.tasks["mail"].apply_async(task_id=task_id, **options)


def published(app: Celery) -> dict[str, bool]:
    return {row.task_id: row.published for row in app.sidejob.runtime.connections.run(PUBLISHED)}


def end(app: Celery, task_id: str) -> None:
    app.sidejob.runtime.connections.run(END, task_id=task_id)


def test_a_full_pool_refuses_a_call_and_keeps_nothing(app: Celery) -> None:
    call(app, "one")
    call(app, "two", countdown=3600)
    for options in ({}, {"unique": "k"}):
        with pytest.raises(Overloaded) as refused:
            call(app, "three", **options)
        assert (refused.value.pool, refused.value.limit, refused.value.used) == ("mail", 2, 2)
    with pytest.raises(Overloaded):
        app.send_task("mail", task_id="three")
    assert (slots(app), kept(app)) == ([(2, 2, 0)], ["one", "two"])
    end(app, "one")
    call(app, "three")
    assert (slots(app), held(app)) == ([(2, 3, 1)], 2)


def test_a_pool_is_called_for_a_task_without_one(app: Celery) -> None:
    pool = CapacityPool("mail", 3)
    other = app.tasks["other"]
    assert pool.apply_async(other, ("a",), weight=2, task_id="one").id == "one"
    assert pool.apply_async(other.s("b"), weight=2, on_full="drop") is None
    assert pool.apply_async("other", weight=2, bounded=False, task_id="two").id == "two"
    assert (slots(app), kept(app)) == ([(4, 2, 0)], ["one", "two"])
    assert pool.children() == [
        SlotHolder("one", None, "other", "celery", 2, False), SlotHolder("two", None, "other", "celery", 2, False)
    ]  # fmt: skip
    with pytest.raises(InvalidValueError, match="A message of plain has no row, and capacity= needs one"):
        pool.cast(app.tasks["plain"])


def test_many_at_once_are_kept_or_refused_together(app: Celery) -> None:
    mail = app.tasks["mail"]
    call(app, "one")
    with pytest.raises(Overloaded):
        app.sidejob.send_many([mail.s(), mail.s()])
    app.sidejob.send_many([mail.s().set(task_id="two"), app.tasks["other"].s().set(task_id="three")])
    assert (slots(app), kept(app), held(app)) == ([(2, 2, 0)], ["one", "three", "two"], 2)


def test_what_celery_calls_for_another_is_not_refused_and_waits(app: Celery) -> None:
    """The parts of a group or chord, and what follows a task, would be lost."""
    mail = app.tasks["mail"]
    group([mail.s() for _ in range(4)], app=app).apply_async()
    assert (slots(app), len(kept(app))) == ([(2, 2, 0)], 4)
    chord([mail.s(), mail.s()], mail.si(), app=app).apply_async()
    assert (slots(app), len(kept(app)), held(app)) == ([(2, 2, 0)], 6, 2)
    with pytest.raises(Overloaded):
        (mail.si() | mail.si()).apply_async()
    for task_id in kept(app):
        end(app, task_id)
    assert slots(app)[0][0] == 0


def test_a_task_that_waits_is_published_when_it_has_a_slot_and_not_begun_before(app: Celery) -> None:
    runtime = app.sidejob.runtime
    pool = CapacityPool("mail", 2)
    call(app, "one")
    call(app, "two")
    pool.apply_async(app.tasks["other"], on_full="wait", task_id="three", priority=1)
    pool.apply_async(app.tasks["other"], on_full="wait", task_id="four", priority=9)
    runtime.connections.write_behind_now()
    app.sidejob.poll()
    assert published(app) == {"one": True, "two": True, "three": False, "four": False}
    worker_id = workers.register(runtime.connections, "test:capacity")
    content = Content(*runtime.connections.run(CONTENT, task_id="three")[0])
    begun = partial(holds.begin, key=("three", 1), content=content, worker_id=worker_id, terms=Terms(1, "dead", 1))
    assert runtime.connections.transact("begin", begun) is None, "a copy that has come from anywhere"
    end(app, "one")
    app.sidejob.poll()
    runtime.connections.write_behind_now()
    assert published(app) == {"two": True, "three": False, "four": True}
    end(app, "two")
    app.sidejob.poll()
    runtime.connections.write_behind_now()
    assert published(app) == {"three": True, "four": True}
    assert runtime.connections.transact("begin", begun).pool == "mail"
    revoke(runtime, ["four"])
    app.sidejob.poll()
    assert (slots(app), kept(app)) == ([(1, 4, 3)], ["three"])


def test_a_durable_task_gives_its_slot_back_between_two_runs(app: Celery) -> None:
    runtime = app.sidejob.runtime
    pool = CapacityPool("mail", 1, covers="running")
    for task_id in ("one", "two"):
        pool.apply_async(app.tasks["other"], task_id=task_id)
    worker_id = workers.register(runtime.connections, "test:capacity")
    content = Content(*runtime.connections.run(CONTENT, task_id="one")[0])
    begin = partial(holds.begin, content=content, worker_id=worker_id, terms=Terms(1, "requeue", 9))
    assert runtime.connections.transact("begin", partial(begin, key=("two", 1))) is None
    assert runtime.connections.transact("begin", partial(begin, key=("one", 1))) is not None
    assert pool.used == 1
    runtime.connections.run(UNLOCK, task_id="one")
    assert [holder.task_id for holder in pool.children()] == ["one"], "it has waited for longer"
    assert slots(app) == [(1, 2, 1)]
    end(app, "one")
    assert [holder.task_id for holder in pool.children()] == ["two"]
    end(app, "two")
    assert slots(app) == [(0, 3, 3)]


def test_a_task_that_is_taken_out_of_the_dead_set_waits_for_the_slots_that_it_had(app: Celery) -> None:
    """Those of its task's pool, and those that its call has named."""
    other = CapacityPool("other", 2)
    call(app, "one")
    other.apply_async(app.tasks["other"], task_id="heavy", weight=2)
    revoke(app.sidejob.runtime, ["one", "heavy"])
    app.sidejob.poll()
    call(app, "two")
    call(app, "three")
    other.apply_async(app.tasks["other"], task_id="light")
    assert app.sidejob.dead.retry_all() == 2
    app.sidejob.runtime.connections.write_behind_now()
    waiting = {"one": False, "heavy": False}
    assert (slots(app), other.used, published(app)) == (
        [(2, 3, 1)], 1, {"two": True, "three": True, "light": True, **waiting},
    )  # fmt: skip
    end(app, "two")
    end(app, "light")
    assert (slots(app), other.used) == ([(2, 4, 2)], 2)
    app.sidejob.poll()
    assert published(app) == {"three": True, "one": True, "heavy": True}


def test_a_task_that_goes_on_as_another_leaves_its_pool_and_waits_in_that_one_s(database_url: str) -> None:
    left, entered = CapacityPool("left", 1), CapacityPool("entered", 1)
    app = make_app("pools", sidejob_database_url=database_url, sidejob_queues={"q": {"pool": left}})
    ran: list[tuple[str, int, int]] = []

    def then() -> None:
        ran.append(("then", left.used, entered.used))

    def first(self: Any, how: str) -> None:
        ran.append(("first", left.used, entered.used))
        if how == "replaces":
            raise self.replace(limited.s())
        if self.request.retries == 0:
            raise self.retry(countdown=0, queue="free")

    begins = app.task(first, name="first", bind=True, durable=True, shared=False)
    limited = app.task(then, name="then", durable=True, shared=False, capacity=entered)
    try:
        app.sidejob.register_tasks()
        limited.apply_async(task_id="there", countdown=3600)
        begins.apply_async(("replaces",), queue="q", task_id="one")
        run_until_quiet(app.sidejob)
        assert (ran, left.used, published(app)["one"]) == ([("first", 1, 1)], 0, False), "there is no slot"
        end(app, "there")
        run_until_quiet(app.sidejob)
        assert ran.pop() == ("then", 0, 1)
        ran.clear()
        begins.apply_async(("retries",), queue="q")
        run_until_quiet(app.sidejob)
        entered.apply_async(begins, ("retries",), queue="q")
        run_until_quiet(app.sidejob)
        assert ran == [("first", 1, 0), ("first", 0, 0), ("first", 0, 1), ("first", 0, 1)], "its call has named a pool"
        assert (left.used, entered.used, kept(app)) == (0, 0, [])
    finally:
        app.sidejob.close()
        app.close()


def test_a_message_that_comes_without_a_row_waits_for_a_slot(app: Celery) -> None:
    runtime = app.sidejob.runtime
    worker_id = workers.register(runtime.connections, "test:adopts")

    def comes(task_id: str) -> None:
        headers, properties = {"id": task_id, "task": "mail", "lang": "py"}, {"delivery_info": {}, "priority": 0}
        about = {
            "content_type": "application/json", "content_encoding": "utf-8", "headers": headers,
            "properties": properties, "exchange": "", "routing_key": "celery", "delivery_mode": None, "declare": [],
        }  # fmt: skip
        message = Message(task_id, "mail", "celery", publication_of(about), b"[[], {}, {}]")
        ours = {ADOPTED: message, WORKER: [(0, worker_id)]}
        durable_run.begin(app.tasks["mail"], Context(id=task_id, task="mail", **ours))

    call(app, "one")
    comes("two")
    assert [(holder.task_id, holder.running) for holder in POOL.children()] == [("one", False), ("two", True)]
    with pytest.raises(durable_run.Copy, match="waits for a slot"):
        comes("three")
    runtime.connections.write_behind_now()
    assert (slots(app), published(app)["three"]) == ([(2, 2, 0)], False)
    end(app, "one")
    app.sidejob.poll()
    assert (slots(app), published(app)["three"]) == ([(2, 3, 1)], True)


def test_a_revoked_task_that_waits_is_buried_without_a_slot(app: Celery) -> None:
    call(app, "one")
    call(app, "two")
    POOL.apply_async(app.tasks["mail"], on_full="wait", task_id="three")
    revoke(app.sidejob.runtime, ["three"])
    app.sidejob.poll()
    assert (slots(app), kept(app)) == ([(2, 2, 0)], ["one", "two"])


def test_a_revoked_task_frees_its_slot_when_it_is_buried(app: Celery) -> None:
    call(app, "one")
    revoke(app.sidejob.runtime, ["one"])
    app.sidejob.poll()
    assert (slots(app), kept(app)) == ([(0, 1, 1)], [])


def test_a_call_whose_answer_was_lost_takes_one_slot(app: Celery, at: Arm) -> None:
    at("durable-keep:after-commit", lost)
    call(app, "one")
    assert (slots(app), kept(app)) == ([(1, 1, 0)], ["one"])


def test_a_call_that_is_not_kept_takes_no_slot(app: Celery) -> None:
    call(app, "one", unique="k")
    with pytest.raises(InvalidValueError, match="task_id='one' is taken"):
        call(app, "one")
    assert call(app, "two", unique="k").id == "one"
    with pytest.raises(InvalidValueError, match="is taken"):
        app.sidejob.send_many([app.tasks["mail"].s().set(task_id="one")])
    assert slots(app) == [(1, 1, 0)]


@pytest.mark.parametrize("many", [False, True])
def test_a_slot_belongs_to_the_caller_s_transaction(app: Celery, database_url: str, many: bool) -> None:
    def ask(task_id: str, transaction: Any) -> None:
        if many:
            app.sidejob.send_many([app.tasks["mail"].s().set(task_id=task_id)], transaction=transaction)
        else:
            call(app, task_id, transaction=transaction)

    with LENDERS["psycopg"](database_url) as lender:
        ask("one", lender.transaction)
        lender.rollback()
        ask("two", lender.transaction)
        ask("three", lender.transaction)
        with pytest.raises(Overloaded):
            ask("four", lender.transaction)
        lender.commit()
    assert (slots(app), kept(app)) == ([(2, 2, 0)], ["three", "two"])


def test_what_a_transaction_with_an_older_view_of_the_store_makes_is_let_in_by_the_sweeper(
    app: Celery, database_url: str
) -> None:
    """Its commit cannot lock a pool that others have changed since it began, and does not fail for that."""
    call(app, "one")
    with LENDERS["psycopg"](database_url) as lender:
        lender.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        lender.sql("SELECT count(*) FROM sidejob.messages")
        end(app, "one")
        call(app, "two")
        call(app, "three", transaction=lender.transaction)
        lender.commit()
    assert slots(app) == [(1, 2, 1)]
    app.sidejob.poll()
    assert slots(app) == [(2, 3, 1)]


def test_a_call_waits_for_its_result_and_expires_with_its_caller(app: Celery) -> None:
    mail = app.tasks["mail"]
    app.backend.store_result("answered", "sent", "SUCCESS")
    assert POOL.call(mail, task_id="answered", timeout=10) == "sent"
    end(app, "answered")
    with pytest.raises(TimeoutError):
        POOL.call(mail, task_id="unanswered", timeout=0.2)
    assert slots(app) == [(1, 2, 1)]
    app.sidejob.runtime.connections.run(DUE)
    app.sidejob.poll()
    assert (slots(app), kept(app)) == ([(0, 2, 2)], [])


def test_a_pool_is_not_passed_over_while_no_store_answers() -> None:
    made = make_app(
        "mail", sidejob_database_url="postgresql://127.0.0.1:1/nowhere", sidejob_on_store_down="publish",
    )  # fmt: skip
    made.task(send_mail, name="mail", durable=True, capacity=POOL, shared=False)
    try:
        with pytest.raises(StoreUnavailableError):
            call(made, "one")
    finally:
        made.sidejob.close()
        made.close()

"""Which rows a worker holds with the fetch of their messages, and which ends of theirs it may write.

No worker runs: the test fetches, ends and gives back as the main process of a worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from kombu import Connection

from celery_sidejob import CapacityPool
from celery_sidejob.hooks.tasks.durable_request import DurableRequest
from celery_sidejob.hooks.worker.holding import Holding, WorkerOutbox
from celery_sidejob.model.durable import HELD, WORKER, Held, HeldRun, Terms
from celery_sidejob.model.errors import StoreUnavailableError
from celery_sidejob.model.loss import Loss, LossKind
from celery_sidejob.operations.ledger import durable_ends, durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.heartbeat.run_ends import QuietEnd
from celery_sidejob.store.broker import holds
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.errors import RowsLocked
from celery_sidejob.store.outbox.holds import Fresh
from celery_sidejob.store.results import Ended, Kept
from celery_sidejob.store.statement import Statement
from celery_sidejob.testing.databases import declare_dead
from celery_sidejob.transport.postgres.acknowledgements import SOON_S
from celery_sidejob.transport.postgres.fetching import BUSY_S
from celery_sidejob.transport.postgres.heart import Heart
from celery_sidejob.transport.postgres.transport import Transport
from tests.tools.contents import content_of
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until
from tests.transport.consuming import Consuming


def nothing() -> None:
    """A body."""


LOCKED = "SELECT task_id FROM messages WHERE locked_by IS NOT NULL ORDER BY task_id"
ROWS = "SELECT task_id FROM messages ORDER BY task_id"


@pytest.fixture
def shop(database_url: str) -> Iterator[Stage]:
    """An app whose broker is its store, with a task that may be repeated and one that may not."""
    made = Stage(database_url, broker="sidejobpg://", task_ignore_result=True)
    for name, on_lost in (("again", "requeue"), ("once", "dead"), ("elsewhere", "requeue")):
        made.app.task(name=name, shared=False, durable=True, on_lost=on_lost, max_losses=3)(nothing)
    pool = CapacityPool("pool", 5)
    made.app.task(name="precious", shared=False, durable=True, on_lost="requeue", max_losses=1)(nothing)
    made.app.task(name="pooled", shared=False, durable=True, on_lost="requeue", capacity=pool)(nothing)
    yield made
    made.close()


@pytest.fixture
def worker(shop: Stage) -> Iterator[Heartbeat]:
    """A worker's heart, which beats when the test says so."""
    heart = Heartbeat(shop.runtime)
    heart.register()
    shop.sidejob.heartbeats = [heart]
    yield heart
    heart.close()


@pytest.fixture
def consuming(shop: Stage, worker: Heartbeat, connect: Callable[..., Connection]) -> Consuming:
    """A consumer of that worker, which does not know the task `elsewhere`."""
    connection = connect()
    known = Consuming(connection, "celery", "managed", prefetch=20)
    outbox = WorkerOutbox(shop.app)
    outbox._may_repeat.pop("elsewhere")
    connection.transport.outbox = outbox
    return known


def fetched(consuming: Consuming, count: int = 1) -> dict[str, HeldRun | None]:
    """Take messages, and return how their rows are held, by task id."""
    consuming.take(count)
    return {message.headers["id"]: message.held for message in consuming.messages[-count:]}


def held(consuming: Consuming, task_id: str) -> Held:
    """Fetch the only message, and return how its row is held."""
    found = fetched(consuming)[task_id]
    assert found is not None
    return found.held


def ends(worker: Heartbeat, shop: Stage, *runs: Held, with_results: bool = False) -> None:
    """Have these runs end well."""
    for run in runs:
        content = partial(content_of, shop.runtime, run.task_id)
        result = Kept(f"task:{run.task_id}", "SUCCESS", b"1", None) if with_results else None
        worker.tasks.ends.add(QuietEnd(Ended(run, result), content))


def test_a_fetch_holds_what_may_be_repeated_and_nothing_else(shop: Stage, consuming: Consuming) -> None:
    shop.sidejob.queue("managed").configure(limit=5)
    for task_id, task, options in [
        ("fresh", "again", {}), ("dead", "once", {}), ("unknown", "elsewhere", {}),
        ("gated", "again", {"queue": "managed"}), ("doomed", "again", {}), ("came back", "again", {}),
        ("in a pool", "pooled", {}), ("lost once", "precious", {}),
    ]:  # fmt: skip
        shop.app.send_task(task, task_id=task_id, **options)
    shop.sql("UPDATE messages SET doom = 'revoked' WHERE task_id = 'doomed'")
    shop.sql("UPDATE messages SET on_lost = 'requeue' WHERE task_id = 'came back'")

    found = fetched(consuming, 8)

    assert {task_id for task_id, hold in found.items() if hold is not None} == {"fresh"}
    assert shop.sql(LOCKED) == [("fresh",)]
    assert shop.sql("SELECT on_lost, max_losses, locked_pid FROM messages WHERE locked_by IS NOT NULL") == [
        ("requeue", 3, None)
    ]


def test_only_an_end_that_is_left_to_be_carried_out_wakes_the_heart(
    shop: Stage, consuming: Consuming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would take Python's lock from the loop, at each end of a run that is held."""
    shop.app.send_task("again", task_id="held")
    shop.app.send_task("once", task_id="not held")
    woken: list[str] = []
    fetched(consuming, 2)
    monkeypatch.setattr(Heart, "wake", lambda heart: woken.append("heart"))
    monkeypatch.setattr(Transport, "wake", lambda transport: woken.append("loop"))

    by_id = {message.headers["id"]: message for message in consuming.messages}
    by_id["held"].ack()
    assert woken == ["loop"]
    by_id["not held"].ack()
    assert woken == ["loop", "heart", "loop"]


def test_of_several_references_to_one_row_in_a_page_only_the_first_has_the_hold(
    shop: Stage, consuming: Consuming
) -> None:
    shop.app.send_task("again", task_id="one")
    shop.sql(
        "INSERT INTO broker_messages (queue, priority, task_id, generation, again) "
        "SELECT queue, priority, task_id, generation, true FROM broker_messages, generate_series(1, 2)"
    )
    consuming.take(3)
    assert [message.held is not None for message in consuming.messages] == [True, False, False]


def test_a_worker_that_was_declared_dead_holds_nothing(
    shop: Stage, worker: Heartbeat, consuming: Consuming, database_url: str
) -> None:
    declare_dead(shop.database_url, shop.sidejob.settings.schema, worker.worker_id)
    shop.app.send_task("again", task_id="one")
    assert fetched(consuming) == {"one": None}
    assert shop.sql(LOCKED) == []


@pytest.mark.parametrize("by", ["fetch", "remove", "worker"])
def test_an_end_goes_with_the_next_statement(shop: Stage, worker: Heartbeat, consuming: Consuming, by: str) -> None:
    if by == "remove":
        shop.app.send_task("plain")
        consuming.drain_once()
    plain = list(consuming.messages)
    shop.app.send_task("again", task_id="one")
    hold = held(consuming, "one")
    ends(worker, shop, hold)
    if by == "fetch":
        shop.app.send_task("again", task_id="two")
        consuming.take(1)
    elif by == "remove":
        plain[0].ack()
        consuming.channel.flush()
    else:
        worker.tasks.ends.write()
    assert ("one",) not in shop.sql(ROWS)
    assert not worker.tasks.ends.has(("one", 1))


def test_only_its_own_end_ends_a_hold(shop: Stage, worker: Heartbeat, consuming: Consuming) -> None:
    """The row is held by the same worker again, of the same generation: it was given back in between."""
    shop.app.send_task("again", task_id="one")
    first = held(consuming, "one")
    worker.tasks.unhold(first)
    worker.errands.run_once()
    consuming.channel.fetching.look_at_all()
    second = held(consuming, "one")

    ends(worker, shop, first)
    worker.tasks.ends.write()
    worker.errands.run_once()

    assert shop.sql(LOCKED) == [("one",)]
    ends(worker, shop, second)
    worker.tasks.ends.write()
    assert shop.sql(ROWS) == []


REFERENCES = "SELECT task_id FROM broker_messages ORDER BY id"


def test_a_row_that_is_held_has_no_reference_until_it_is_given_back_to_its_place(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    for task_id in ("back", "runs", "doomed"):
        shop.app.send_task("again", task_id=task_id)
    found = {task_id: fetched.held for task_id, fetched in fetched(consuming, 3).items() if fetched is not None}
    assert (len(found), shop.sql(REFERENCES)) == (3, [])
    shop.sql("UPDATE messages SET doom = 'revoked' WHERE task_id = 'doomed'")
    shop.app.send_task("again", task_id="later")

    for _ in range(2):
        worker.tasks.unhold(found["back"], found["doomed"])
        worker.errands.run_once()
    consuming.close()

    assert shop.sql(LOCKED) == [("runs",)]
    assert shop.sql(REFERENCES) == [("back",), ("later",)]
    assert shop.sql("SELECT next_check_at <= now() FROM messages WHERE task_id = 'doomed'") == [(True,)]


def test_what_is_fetched_and_cannot_be_delivered_is_given_back(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    for task_id, task in (("held", "again"), ("not held", "once")):
        shop.app.send_task(task, task_id=task_id)
    consuming.channel.connection._callbacks.clear()  # its consumers were cancelled meanwhile
    consuming.channel.poll()
    consuming.channel.poll()
    worker.errands.run_once()
    assert shop.sql(LOCKED) == []
    holders = "SELECT task_id, holder FROM broker_messages ORDER BY id"
    wait_until(lambda: shop.sql(holders) == [("held", None), ("not held", None)], message="both to be given back")


def locking(shop: Stage) -> psycopg.Connection[Any]:
    """A user's transaction that has locked every row."""
    user = psycopg.connect(shop.database_url)
    user.execute(f"SELECT FROM {shop.sidejob.settings.schema}.messages FOR UPDATE")
    return user


def test_no_statement_waits_for_a_row_that_a_transaction_has_locked(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    shop.app.send_task("again", task_id="ends")
    hold = held(consuming, "ends")
    shop.app.send_task("again", task_id="begins")
    with locking(shop):
        ends(worker, shop, hold)
        assert fetched(consuming) == {"begins": None}
        shop.app.send_task("again", task_id="goes on")
        assert set(fetched(consuming)) == {"goes on"}
        assert worker.errands.waiting, "the end waits for the row where nobody waits for it"
        assert worker.tasks.ends.has(("ends", 1))
    worker.errands.run_once()
    assert ("ends",) not in shop.sql(ROWS)
    assert not worker.tasks.ends.has(("ends", 1))


LOCKS = {
    "updated": "UPDATE results SET state = state",
    "deleted": "DELETE FROM results",
    "made": "INSERT INTO results (key, state, body) VALUES ('task:stuck', 'STARTED', '')",
}


@pytest.mark.parametrize("by", ["fetch", "remove", "hold", "worker"])
@pytest.mark.parametrize("how", LOCKS)
def test_an_end_waits_for_its_locked_result_and_keeps_nothing_else_waiting(
    shop: Stage, worker: Heartbeat, consuming: Consuming, how: str, by: str
) -> None:
    shop.app.send_task("plain")
    consuming.take(1)
    for task_id in ("stuck", "free"):
        shop.app.send_task("again", task_id=task_id)
    runs = [hold.held for hold in fetched(consuming, 2).values() if hold is not None]
    if how != "made":
        shop.sql("INSERT INTO results (key, state, body) VALUES ('task:stuck', 'STARTED', '')")
    bounded = f"-c search_path={shop.sidejob.settings.schema} -c idle_in_transaction_session_timeout=5s"
    with psycopg.connect(direct(shop.database_url), options=bounded) as user:
        user.execute(LOCKS[how])
        ends(worker, shop, *runs, with_results=True)
        if by == "fetch":
            shop.app.send_task("again", task_id="goes on")
            assert set(fetched(consuming)) == {"goes on"}
        elif by == "remove":
            consuming.messages[0].ack()
            consuming.channel.flush()
            assert shop.sql("SELECT FROM broker_messages") == []
        elif by == "hold":
            page = {"again": (SimpleNamespace(hold=None), Fresh(("again", 1), content_of(shop.runtime, "free"), 3))}
            Holding(shop.app)._hold_tasks(page)
        else:
            worker.tasks.ends.write()
        with pytest.raises(RowsLocked):
            worker.errands.run_once()
        assert shop.sql("SELECT key FROM results WHERE state = 'SUCCESS'") == [("task:free",)]
        assert [worker.tasks.ends.has((task_id, 1)) for task_id in ("stuck", "free")] == [True, False]
        assert user.execute("SELECT 1").fetchone(), "nothing has waited until this transaction was ended"
        user.rollback()
    worker.errands.run_once()
    assert len(shop.sql("SELECT key FROM results WHERE state = 'SUCCESS'")) == 2
    assert {("stuck",), ("free",)}.isdisjoint(shop.sql(ROWS))


@pytest.mark.parametrize("count", [0, 1])
def test_the_commit_of_a_page_waits_as_any_other(
    shop: Stage, worker: Heartbeat, consuming: Consuming, count: int
) -> None:
    """It waits for all others with a notification: those are committed one after the other."""
    setting = Statement("SELECT current_setting('lock_timeout') AS set")
    shop.app.send_task("again", task_id="one")
    runs = [Ended(held(consuming, "one"), Kept("task:one", "SUCCESS", b"1", None))][:count]

    def work(executor: OwnExecutor) -> list[str]:
        before, over = executor.run(setting)[0].set, holds.remove(executor, runs)
        assert len(over) == count
        return [before, executor.run(setting)[0].set]

    before, after = shop.runtime.connections.transact("read", work)
    assert before == after


def test_a_run_that_was_called_lost_takes_itself_back(shop: Stage, worker: Heartbeat, consuming: Consuming) -> None:
    shop.app.send_task("again", task_id="one")
    hold = held(consuming, "one")
    declare_dead(shop.database_url, shop.sidejob.settings.schema, worker.worker_id)
    assert durable_runs.take_from_the_dead(shop.runtime) == 1
    assert shop.sql("SELECT losses, on_lost FROM messages") == [(0, "requeue")], "nobody knows whether it had begun"

    over = Ended(hold, Kept("task:one", "SUCCESS", b"1", None))
    durable_ends.end_held(shop.runtime, over, content_of(shop.runtime, "one"), is_unknown=False)

    assert shop.sql(ROWS) == []
    assert shop.sql("SELECT state FROM results") == [("SUCCESS",)]


def test_an_end_alone_whose_answer_is_lost_counts(
    shop: Stage, worker: Heartbeat, consuming: Consuming, at: Arm, caplog: pytest.LogCaptureFixture
) -> None:
    shop.app.send_task("again", task_id="one")
    hold = held(consuming, "one")
    with locking(shop):
        ends(worker, shop, hold)
        worker.tasks.ends.write()
    at("durable-end:after-commit", lost)
    with pytest.raises(StoreUnavailableError):
        worker.errands.run_once()
    worker.errands.run_once()
    assert (shop.sql(ROWS), worker.tasks.ends.has(("one", 1))) == ([], False)
    assert "does not count" not in caplog.text


def begin(shop: Stage, worker: Heartbeat, task_id: str) -> bool:
    """Lock a row for a run, as the process of a pool does."""
    run = Run((task_id, 1), "again", worker.worker_id, shop.runtime, content_of(shop.runtime, task_id))
    return durable_runs.begin(shop.runtime, run, terms=Terms(1, "requeue", 3), is_here=False)


def test_a_hold_that_is_not_sure_is_given_up_before_the_row_is_locked(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    shop.app.send_task("again", task_id="one")
    hold = held(consuming, "one")
    assert not begin(shop, worker, "one")
    durable_runs.unhold(shop.runtime, [hold._replace(at=hold.at - timedelta(seconds=1))])
    assert not begin(shop, worker, "one"), "it is held anew"
    durable_runs.unhold(shop.runtime, [hold])
    assert begin(shop, worker, "one")
    durable_runs.unhold(shop.runtime, [hold])
    assert shop.sql(LOCKED) == [("one",)], "its run has begun"


def test_a_held_run_that_is_rejected_is_sent_again_as_its_message_is_gone(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    shop.app.send_task("again", task_id="one")
    held(consuming, "one")
    run = Run(("one", 1), "again", worker.worker_id, shop.runtime, content_of(shop.runtime, "one"), is_held=True)
    durable_runs.put_back(shop.runtime, run)
    assert shop.sql("SELECT locked_by, published_at, next_check_at <= now() FROM messages") == [(None, None, True)]


@pytest.mark.parametrize("by", ["its process has died", "nobody runs it"])
def test_what_has_ended_well_is_not_taken_from_its_worker(shop: Stage, worker: Heartbeat, by: str) -> None:
    """Its end waits to be written: neither the death of its process nor a look for strays may call it lost."""
    shop.app.send_task("again", task_id="one")
    assert begin(shop, worker, "one")
    ((at,),) = shop.sql("UPDATE messages SET locked_at = now() - interval '1 hour' RETURNING locked_at")
    ends(worker, shop, Held("one", 1, worker.worker_id, at))
    if by == "its process has died":
        worker.tasks.died[1] = Loss(LossKind.KILLED)
    else:
        worker.tasks._strays_at = float("-inf")
    worker.tasks.run_once()
    assert shop.sql("SELECT losses FROM messages WHERE locked_by IS NOT NULL") == [(0,)]
    worker.tasks.ends.write()
    assert shop.sql(ROWS) == []


def test_an_end_that_cannot_be_written_at_all_leaves_its_row_to_the_look_for_strays(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    shop.app.send_task("again", task_id="one")
    hold = held(consuming, "one")
    worker.tasks.ends.add(QuietEnd(Ended(hold._replace(at=hold.at - timedelta(seconds=1)), None), lambda: 1 / 0))
    worker.tasks.ends.write()
    worker.errands.run_once()
    assert not worker.tasks.ends.has(("one", 1))


def test_nobody_looks_for_what_is_held(shop: Stage, consuming: Consuming) -> None:
    shop.app.send_task("again", task_id="one")
    held(consuming, "one")
    assert shop.sql("SELECT next_check_at = 'infinity' FROM messages") == [(True,)]


def test_a_worker_that_has_not_beaten_for_a_lease_begins_nothing_that_it_held(
    shop: Stage, worker: Heartbeat, consuming: Consuming
) -> None:
    """It may have been declared dead since: it was frozen, and does not know yet."""
    shop.app.send_task("again", task_id="one")
    held(consuming, "one")
    request = DurableRequest(consuming.messages[0], app=shop.app, task=shop.app.tasks["again"])
    assert request.request_dict[HELD].stands
    worker._beat_at = float("-inf")
    given = request.request_dict
    assert (HELD in given, given[WORKER]) == (False, []), "its process leaves it, and the row is given back"


def test_the_end_of_a_held_message_is_no_removal(shop: Stage, worker: Heartbeat, consuming: Consuming) -> None:
    shop.app.send_task("again", task_id="one")
    held(consuming, "one")
    consuming.messages[0].ack()
    assert not consuming.channel.acknowledgements.done


def test_a_busy_worker_fetches_a_little_later(
    shop: Stage, worker: Heartbeat, consuming: Consuming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as as many messages wait in it as run; the next statement is then for more of them."""
    fetching, acknowledgements = consuming.channel.fetching, consuming.channel.acknowledgements
    fetching.hungry = True
    now = [monotonic() + 60]
    monkeypatch.setattr("celery_sidejob.transport.postgres.fetching.monotonic", lambda: now[0])

    def is_worth_it(room: int, *, is_busy: bool, after_s: float) -> bool:
        monkeypatch.setattr(WorkerOutbox, "is_busy", is_busy)
        fetching._fetched_at = now[0] - after_s
        qos: Any = SimpleNamespace(_delivered=dict.fromkeys(range(8 - room + 3)), _dirty={0, 1, 2})
        return bool(fetching.is_worth_it(room, acknowledgements, qos))

    assert is_worth_it(4, is_busy=False, after_s=0.0)
    assert not is_worth_it(3, is_busy=False, after_s=0.0)
    assert is_worth_it(3, is_busy=False, after_s=SOON_S)
    assert not is_worth_it(4, is_busy=True, after_s=SOON_S)
    assert is_worth_it(4, is_busy=True, after_s=BUSY_S)

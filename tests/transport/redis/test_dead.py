"""The dead list: what becomes of a message that is given up, by the dead set where it has a row, else by a person."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from celery_sidejob import RunningJob, task_buried
from celery_sidejob.hooks.broker import broker_check
from celery_sidejob.model.durable import Death, Terms
from celery_sidejob.operations.ledger import burials, durable_runs
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.store import workers
from celery_sidejob.store.outbox import tasks
from celery_sidejob.store.statement import Statement
from celery_sidejob.transport.redis import dead as dead_list
from celery_sidejob.transport.redis.dead import DeadList
from tests.tools.apps import make_app
from tests.tools.commands import Said, ask
from tests.tools.contents import content_of
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish
from tests.transport.dead_lists import check_reading_on
from tests.transport.redis.test_records import dead, listed, recover

DUE = Statement("UPDATE {messages} SET next_check_at = now() WHERE locked_by IS NULL")
LIMIT = {"delivery_limit": 1}


@pytest.fixture
def app(database_url: str, broker_url: str) -> Iterator[Celery]:
    """An app with a store, a durable task and a job, whose workers all die."""
    made = make_app(
        "shop",
        broker=broker_url,
        result_backend="cache+memory://",
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["shop.*"],
        task_default_queue="queue",
        sidejob_lost_after=0.1,
    )

    @made.sidejob.task(name="job")
    def job(job: RunningJob) -> None:
        """Never run here."""

    made.job = job
    made.sidejob.poll()  # its first look at a new broker takes it for an emptied one
    yield made
    made.sidejob.close()
    made.close()


@pytest.fixture
def killed(connect: Connect) -> Any:
    """Has so many messages of the queue, the oldest, end in the dead list."""

    def kill(count: int = 1) -> None:
        dead(connect, count, **LIMIT)
        recover(connect, **LIMIT)

    return kill


def left(server: redis.Redis) -> list[str | None]:
    """The task ids in the dead list."""
    return [json.loads(text)["task_id"] for text in server.lrange("_sidejob.dead", 0, -1)]


def sweep(app: Celery) -> None:
    """Sweep once, when all that is kept is due to be looked at."""
    app.sidejob.runtime.connections.transact("due", lambda executor: executor.run(DUE))
    app.sidejob.poll()


def test_the_message_of_a_durable_task_is_in_the_dead_set_once(
    app: Celery, server: redis.Redis, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    task_buried.connect(receiver := lambda **facts: told.append(facts["task_id"]), weak=False)
    result = app.send_task("shop.mail", task_id="one")
    killed()
    assert left(server) == ["one"]

    monkeypatch.setattr(app.sidejob.runtime.broker, "forget_buried", lambda texts: False)  # who did so has died
    sweep(app)
    monkeypatch.undo()
    assert left(server) == ["one"]
    for _ in range(3):
        sweep(app)
    task_buried.disconnect(receiver)

    assert (left(server), listed(server, "queue"), told) == ([], [], ["one"])
    (entry,) = app.sidejob.dead.list()
    assert (entry.task_id, entry.reason, entry.group) == ("one", "lost", "PoisonedMessage")
    assert result.state == "FAILURE"

    app.sidejob.dead.retry(entry.id)
    (again,) = server.lrange("queue", 0, -1)
    assert "delivery_count" not in json.loads(again)["properties"]


def test_only_a_row_that_waits_is_doomed_by_it(app: Celery, server: redis.Redis, killed: Any) -> None:
    for task_id in ("runs", "is over", "of another app"):
        app.send_task("shop.mail", task_id=task_id)
    killed(3)
    runtime = app.sidejob.runtime
    worker_id = workers.register(runtime.connections, "test:1")
    runs, is_over = (
        Run((task_id, 1), "shop.mail", worker_id, runtime, content_of(runtime, task_id))
        for task_id in ("runs", "is over")
    )
    for run in (runs, is_over):
        durable_runs.begin(runtime, run, terms=Terms(1, "requeue", 3), is_here=False)
    burials.fail(runtime, is_over.key, Death("failed", "E: e"), by="run", worker_id=worker_id)
    burials.forget(runtime, ("of another app", 1))

    sweep(app)

    assert left(server) == ["of another app"], "no store of this app knows it"
    assert [entry.task_id for entry in app.sidejob.dead.list()] == ["is over"]
    assert tasks.read(runtime.connections, "runs").doom is None


@pytest.mark.parametrize(
    ("task_id", "header"),
    [("nul\0", {"n": 1}), ("surrogate\ud800", {"n": 1}), ("huge", {"n": 2**70}), ("list", {"n": 1, "t": 5}),
     ("store", {"n": 1, "s": ["main"]}), ("infinite", {"n": float("inf")}), (["list"], {"n": 1}),
     ("decimal", {"n": {"__type__": "decimal", "__value__": "x"}})],
    ids=["nul", "surrogate", "huge", "tried", "store", "infinite", "id", "undecodable"],
)  # fmt: skip
def test_an_entry_that_no_row_can_have_is_left_and_keeps_none_behind_it(
    app: Celery, server: redis.Redis, killed: Any, task_id: Any, header: Any
) -> None:
    message = json.dumps({"headers": {"id": task_id, "sidejob_durable": {"v": 1, **header}}, "properties": {}})
    entry = {
        "queue": "queue",
        "list": "queue",
        "task_id": task_id,
        "reason": "forged",
        "at": time.time(),
        "message": message,
    }
    server.rpush("_sidejob.dead", json.dumps(entry))
    app.send_task("shop.mail", task_id="behind it")
    killed()
    sweep(app)
    assert left(server) == [task_id]
    assert [entry.task_id for entry in app.sidejob.dead.list()] == ["behind it"]


def test_an_entry_whose_row_cannot_be_doomed_keeps_none_behind_it(
    app: Celery, server: redis.Redis, killed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poison = burials.poison

    def fail(runtime: Any, key: Any) -> bool:
        if key[0] == "first":
            raise ValueError("injected")
        return poison(runtime, key)

    monkeypatch.setattr(burials, "poison", fail)
    for task_id in ("first", "second"):
        app.send_task("shop.mail", task_id=task_id)
    killed(2)
    sweep(app)
    assert left(server) == ["first"]
    assert "of task 'first' was left there" in caplog.text
    assert [entry.task_id for entry in app.sidejob.dead.list()] == ["second"]


def test_doorbells_go_and_ordinary_messages_stay(
    app: Celery, server: redis.Redis, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_list, "PAGE", 2)
    for number in range(5):
        app.send_task("ordinary", task_id=f"task{number}")
        app.job.enqueue()
    killed(10)
    (found,) = [one for one in broker_check.findings(app) if one.check == "transport"]
    assert (found.level, found.found.rpartition("; ")[2]) == ("warning", "10 are in the dead list")
    sweep(app)
    assert app.sidejob.stats()["dead_list"] == 5
    assert sorted(left(server)) == [f"task{number}" for number in range(5)]


def test_the_list_keeps_the_newest_and_none_for_ever(
    connect: Connect, server: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_list, "PAGE", 2)
    now = time.time()
    ages = {"ancient": 91 * dead_list.DAY_S, **{f"task{number}": number for number in reversed(range(6))}}
    for task_id, age in ages.items():
        entry = {"queue": "q", "list": "q", "task_id": task_id, "reason": "r", "at": now - age, "message": "{}"}
        server.rpush("_sidejob.dead", json.dumps(entry))
    server.lpush("_sidejob.dead", "no entry")
    deads = DeadList.of(connect().default_channel)
    assert deads.bound(limit=None, days=None) == 0
    assert deads.bound(limit=10, days=90) == 2
    assert "(task ancient) was dropped from the dead list" in caplog.text
    assert len(deads) == 6
    consuming = Consuming(connect(dead_list_limit=2), "queue", prefetch=1)
    consuming.drain(0.01)
    wait_until(lambda: left(server) == ["task1", "task0"], message="its heart to look after the list")


def test_a_list_is_read_on_from_a_place_and_anew_if_something_before_it_is_gone(
    connect: Connect, server: redis.Redis, killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_list, "PAGE", 2)
    check_reading_on(connect, killed, DeadList.of(connect().default_channel))


# -- what a person does ----------------------------------------------------------------------------------------------


def asked(url: str, *words: object) -> Said:
    """Give a command to a plain app with this broker."""
    app = Celery("plain", broker=url, set_as_current=False)
    try:
        return ask(app, "transport", "dead", *words)
    finally:
        app.close()


def test_a_person_sees_retries_and_deletes_them(
    connect: Connect, server: redis.Redis, killed: Any, broker_url: str, redis_url: str
) -> None:
    for number in range(3):
        publish(connect(), "queue", number, headers={"id": f"task{number}", "task": "shop.mail"})
    killed(3)
    place = left(server).index("task1")
    entry = json.loads(server.lindex("_sidejob.dead", place))
    counted = json.loads(entry["message"])
    counted["properties"]["delivery_count"] = 1  # as with a higher limit
    server.lset("_sidejob.dead", place, json.dumps({**entry, "message": json.dumps(counted)}))
    server.rpush("_sidejob.dead", "[]")
    assert asked(broker_url, "delete", "--yes", asked(broker_url, "list", "--json").document[-1]["id"]).code == 0
    server.rpush("queue", b"{\xff")
    dead_consumer = dead(connect, 0)
    dead_consumer.drain()
    (nonsense,) = [one for one in asked(broker_url, "list", "--json").document if one["task_id"] is None]
    found = asked(redis_url, "list")
    assert found.code == 0
    assert len(found.lines) == 5
    assert all(sum(f"queue shop.mail task{number}" in line for line in found.lines) == 1 for number in range(3))
    assert "There are more" in asked(broker_url, "list", "--limit", 1).err

    publish(connect(), "queue", "next")
    assert asked(broker_url, "retry", "task1").lines == ["1 message retried."]
    assert listed(server, "queue") == ["next", 1]
    (again,) = [json.loads(text) for text in server.lrange("queue", 0, 0)]
    assert "delivery_count" not in again["properties"]
    assert server.llen("_sidejob.bell.queue") == 1
    assert asked(broker_url, "retry", "task1").code == 1

    assert "can only be deleted" in asked(broker_url, "retry", nonsense["id"]).err
    for verb in ("list", "retry", "delete"):
        said = asked(broker_url, verb, "--queue", "queues")
        assert (said.code, said.err) == (0, "Nothing matches. Did you mean 'queue'? There are: 'queue'.\n")
    assert asked(broker_url, "retry", "--queue", "queue", "--json").document == {"retried": 2}
    assert sorted(listed(server, "queue")[2:]) == [0, 2]
    assert "Delete 1 message of the dead list for good?" in asked(broker_url, "delete", nonsense["id"]).err
    assert asked(broker_url, "delete", nonsense["id"], "--yes").lines == ["1 message deleted."]
    assert server.llen("_sidejob.dead") == 0
    assert asked(broker_url, "delete", "--queue", "queue").err == "Nothing matches: the dead list is empty.\n"
    assert asked(broker_url, "delete").code == 2

"""Many durable tasks in one call: all or none, in order, each as Celery would have sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery, chain, chord, group, signals
from celery.canvas import Signature
from celery.result import AsyncResult
from kombu.exceptions import EncodeError

from celery_sidejob import InvalidValueError, SideJob, StoreUnavailableError
from celery_sidejob.hooks.broker import publishing
from celery_sidejob.hooks.messages import carried
from celery_sidejob.operations.ledger import keeping
from celery_sidejob.store.statement import Statement
from tests.tools.apps import make_app
from tests.tools.waiting import wait_until


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Celery]:
    """An app with a durable task, a plain one and a broker to which nobody listens."""
    made = make_app("shop", broker=redis_url, sidejob_database_url=database_url, task_ignore_result=True)

    @made.task(name="mail", durable=True, shared=False)
    def mail(to: object, *, subject: str = "") -> None:
        pass

    @made.task(name="plain", shared=False)
    def plain() -> None:
        pass

    @made.sidejob.task(name="job")
    def job(job: Any) -> None:
        pass

    made.finalize()
    made.sidejob.poll()  # its first look at a new broker takes it for an emptied one
    yield made
    made.sidejob.close()
    made.close()


@pytest.fixture
def mail(app: Celery) -> Any:
    return app.tasks["mail"]


def published(app: Celery, queue: str = "celery") -> list[dict[str, Any]]:
    """What is in the broker, the oldest first."""
    with redis.Redis.from_url(app.conf.broker_url) as client:
        return [json.loads(text) for text in reversed(client.lrange(queue, 0, -1))]


def kept(app: Celery) -> list[str]:
    """The ids of the rows."""
    rows = app.sidejob.runtime.connections.run(Statement("SELECT task_id FROM {messages} ORDER BY task_id"))
    return [row.task_id for row in rows]


def ids(app: Celery, queue: str = "celery") -> list[str]:
    """The ids in the broker."""
    return [message["headers"]["id"] for message in published(app, queue)]


def test_each_is_sent_as_by_itself_and_in_order(app: Celery, mail: Any) -> None:
    alone = mail.apply_async(("me",), {"subject": "hello"}, task_id="alone", headers={"mine": 1}, expires=600)
    signatures = [
        mail.s("me", subject="hello").set(task_id="first", headers={"mine": 1}, expires=600),
        mail.s(["two"]).set(queue="letters", compression="zlib"),
        app.signature("mail", ("three",)),
        Signature("mail", ("four",)),
    ]

    results = app.sidejob.send_many(signatures)

    assert all(isinstance(result, AsyncResult) for result in results)
    assert [result.id for result in results[:1]] == ["first"]
    assert ids(app) == [alone.id, results[0].id, results[2].id, results[3].id]
    assert ids(app, "letters") == [results[1].id]
    assert kept(app) == sorted([alone.id, *(result.id for result in results)])
    one, many = published(app)[:2]
    assert one["body"] == many["body"]
    assert set(one["headers"]) == set(many["headers"])
    assert {key for key in one["headers"] if one["headers"][key] != many["headers"][key]} == {
        "id",
        "root_id",
        "expires",
    }
    assert set(one["properties"]) == set(many["properties"])
    assert "task_id" not in signatures[1].options, "the caller's signatures are left as they are"


def test_signals_are_sent_as_celery_sends_them(app: Celery, mail: Any) -> None:
    seen: list[tuple[str, str]] = []

    def before(headers: dict[str, Any], **_: Any) -> None:
        headers["traceparent"] = f"trace-{headers['id']}"
        seen.append(("before", headers["id"]))

    def after(headers: dict[str, Any], **_: Any) -> None:
        seen.append(("after", headers["id"]))

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        app.sidejob.send_many(mail.s(number).set(task_id=str(number)) for number in range(2))
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)

    assert seen == [("before", "0"), ("after", "0"), ("before", "1"), ("after", "1")]
    assert [message["headers"]["traceparent"] for message in published(app)] == ["trace-0", "trace-1"]


def test_a_chain_is_one_message(app: Celery, mail: Any) -> None:
    result, _ = app.sidejob.send_many([chain(mail.s(1), app.tasks["plain"].si()), mail.s(2)])

    assert ids(app)[0] == result.parent.id
    assert len(kept(app)) == 2


BAD = {
    "is no signature": lambda app, mail: [mail],
    "group or a chord": lambda app, mail: [group(mail.s(1), mail.s(2))],
    "or a chord": lambda app, mail: [chord([mail.s(1)], mail.s(2))],
    "begins with a group": lambda app, mail: [chain(group(mail.s(1), mail.s(2)), mail.s(3))],
    "plain, which is not durable": lambda app, mail: [app.tasks["plain"].s()],
    "unknown, which is not durable": lambda app, mail: [app.signature("unknown")],
    "whose calls are jobs": lambda app, mail: [app.tasks["job"].s()],
    "given to two": lambda app, mail: [mail.s(1).set(task_id="one"), mail.s(2).set(task_id="one")],
    "give transaction= to": lambda app, mail: [mail.s(1).set(transaction="default")],
    "another app": lambda app, mail: [Celery("other", set_as_current=False).signature("mail", (1,))],
    r"^signatures\[1\] of send_many\(\), of mail: .*unexpected keyword": lambda app, mail: [mail.s(1, nothing=1)],
    "is taken": lambda app, mail: [mail.s(1).set(task_id="taken")],
    r"^signatures\[1\] of send_many\(\): args\[0\] of the call of mail .*not JSON serializable": lambda app, mail: [
        mail.s(object())
    ],
}
ITSELF: dict[str, Any] = {"a": [1]}
ITSELF["a"].append(ITSELF)
DEEP: list[Any] = []
for _ in range(200_000):  # the encoder of Python 3.14 goes as deep as the stack of its thread
    DEEP = [2, DEEP]


@pytest.mark.parametrize("problem", BAD)
def test_bad_input_changes_nothing(app: Celery, mail: Any, problem: str) -> None:
    mail.apply_async(("before",), task_id="taken")

    with pytest.raises((InvalidValueError, TypeError), match=problem):
        app.sidejob.send_many([mail.s("good"), *BAD[problem](app, mail), mail.s("good too")])

    assert kept(app) == ids(app) == ["taken"]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"b": {"c": object()}}, r"args\[0\]\['b'\]\['c'\] of the call of mail .*not JSON serializable"),
        (ITSELF, r"args\[0\]\['a'\]\[1\] of the call of mail .*Circular reference"),
        (DEEP, r"args\[0\](\[1\]){19}… of the call of mail .*(recursion|Stack overflow)"),
    ],
    ids=["of a wrong type", "in itself", "deep"],
)
def test_arguments_that_cannot_be_encoded_are_refused_with_the_path(
    app: Celery, mail: Any, value: Any, fault: str
) -> None:
    with pytest.raises(InvalidValueError, match=fault) as refused:
        mail.delay(value)
    assert isinstance(refused.value, EncodeError), "Celery's, which an app may expect"
    with pytest.raises(InvalidValueError, match=fault.replace("args", "kwargs", 1).replace(r"\[0\]", r"\['to'\]", 1)):
        mail.delay(to=value)

    assert kept(app) == []


def test_arguments_that_are_too_large_are_refused(app: Celery, mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is given a row of several hundred megabytes counts as away, for all calls."""
    monkeypatch.setattr(carried, "MOST_BYTES", 1000)
    large = "x" * 1000
    calls = [
        lambda: mail.delay(large), lambda: mail.apply_async((large,), compression="zlib"),
        lambda: app.sidejob.send_many([mail.s("me"), mail.s(large)]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidValueError, match="The arguments of the call of mail take 1079 bytes"):
            call()
    mail.delay("me")
    with pytest.raises(InvalidValueError, match="mail take"):
        mail.delay(large)  # its message is made after that one
    assert len(kept(app)) == 1


def test_many_pages_are_one_commit(app: Celery, mail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "PAGE", 3)
    monkeypatch.setattr(publishing, "TOGETHER", 2)
    results = app.sidejob.send_many(mail.s(number) for number in range(10))
    assert ids(app) == [result.id for result in results]
    (row,) = app.sidejob.runtime.connections.run(
        Statement("SELECT count(DISTINCT due_at) AS transactions FROM {messages}")
    )
    assert row.transactions == 1, "now() is that of the transaction"

    with pytest.raises(InvalidValueError, match="is taken"):
        app.sidejob.send_many([*(mail.s(number) for number in range(10)), mail.s(10).set(task_id=results[0].id)])
    assert len(kept(app)) == len(ids(app)) == 10


def test_what_is_due_far_ahead_waits_in_the_store(app: Celery, mail: Any) -> None:
    far, near, now = app.sidejob.send_many([mail.s(1).set(countdown=86400), mail.s(2).set(countdown=5), mail.s(3)])

    assert ids(app) == [near.id, now.id]
    assert kept(app) == sorted([far.id, near.id, now.id])


def test_nothing_is_asked_for_by_an_empty_list() -> None:
    app = Celery("nowhere", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.sidejob_database_url = "postgresql://nobody@127.0.0.1:1/nothing"

    assert SideJob(app).send_many([]) == []


def test_a_queue_that_takes_none_does_not_hold_up_the_others(app: Celery, mail: Any) -> None:
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.set("broken", "no list")

    broken, good = app.sidejob.send_many([mail.s(1).set(queue="broken"), mail.s(2)])

    assert set(ids(app)) == {good.id}
    assert kept(app) == sorted([broken.id, good.id])


def test_it_shares_the_fate_of_the_transaction(app: Celery, mail: Any, database_url: str) -> None:
    signatures = [mail.s(number) for number in range(3)]
    with psycopg.connect(database_url) as connection:
        app.sidejob.send_many(signatures, transaction=connection)
        assert kept(app) == []
        connection.rollback()
        results = app.sidejob.send_many(signatures, transaction=connection)
        with pytest.raises(InvalidValueError, match="is taken"):
            app.sidejob.send_many([mail.s(3), mail.s(4).set(task_id=results[0].id)], transaction=connection)
        connection.commit()
    assert kept(app) == sorted(result.id for result in results)
    assert ids(app) == [], "psycopg tells nobody of a commit"

    app.sidejob.runtime.connections.run(Statement("UPDATE {messages} SET next_check_at = now()"))
    app.sidejob.poll()

    assert set(ids(app)) == {result.id for result in results}


def test_it_is_published_after_the_commit_where_that_is_told(app: Celery, mail: Any, database_url: str) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        inner = connection.begin_nested()
        app.sidejob.send_many([mail.s("rolled back")], transaction=connection)
        inner.rollback()
        results = app.sidejob.send_many([mail.s(1), mail.s(2).set(countdown=86400)], transaction=connection)
        assert ids(app) == []
    engine.dispose()

    wait_until(lambda: ids(app) == [results[0].id], message="the committed task, and no other, to be published")
    assert kept(app) == sorted(result.id for result in results)


@pytest.mark.parametrize("setting", ["error", "publish"])
def test_without_a_store(redis_url: str, setting: str) -> None:
    app = make_app(
        "shop",
        broker=redis_url,
        sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing",
        sidejob_on_store_down=setting,
        sidejob_durable_tasks=["mail"],
        task_ignore_result=True,
    )
    signatures = [app.signature("mail", (number,)) for number in range(2)]

    if setting == "error":
        with pytest.raises(StoreUnavailableError):
            app.sidejob.send_many(signatures)
        assert ids(app) == []
    else:
        results = app.sidejob.send_many(signatures)
        assert ids(app) == [result.id for result in results]
        assert all("sidejob_durable" not in message["headers"] for message in published(app))
    app.sidejob.close()
    app.close()


def test_monitors_are_told(app: Celery, mail: Any) -> None:
    app.conf.task_send_sent_event = True
    heard: list[str] = []
    with app.connection() as connection, redis.Redis.from_url(app.conf.broker_url) as client:
        receiver = app.events.Receiver(connection, handlers={"task-sent": lambda event: heard.append(event["uuid"])})
        with receiver.consumer_context() as (listening, _, _):
            while not client.pubsub_numpat():
                with suppress(TimeoutError):
                    listening.drain_events(timeout=0.1)
            results = app.sidejob.send_many([mail.s(1), mail.s(2)])
            while len(heard) < 2:
                listening.drain_events(timeout=10)
    assert heard == [result.id for result in results]


def test_in_eager_mode_they_run_here() -> None:
    app = make_app("eager", task_always_eager=True, sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing")

    @app.task(durable=True, shared=False)
    def plus(one: int, other: int) -> int:
        return one + other

    assert [result.get() for result in app.sidejob.send_many([plus.s(1, 2), plus.s(3, 4)])] == [3, 7]

"""Messages of calls that are made after one of Celery's: what Celery makes, to the byte, where nothing looks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any

import psycopg
import pytest
from celery import Celery, signals
from celery.app.amqp import AMQP
from celery.app.task import Task
from celery.canvas import Signature

from celery_sidejob import CapacityPool, InvalidValueError
from celery_sidejob.hooks.tasks.composing import MOST_MODELS, Composed
from tests.tools.apps import make_app
from tests.tools.looking import looking

LATER = datetime(2100, 1, 1, tzinfo=UTC)
QUOTED = 'a "quoted" \\ %(id)s %s \N{SNOWMAN} \N{PILE OF POO}\n'


class OwnAMQP(AMQP):
    """A project's own, which may make messages of its own."""


class Traced(Task):
    """A project's task that looks at each call."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        return super().apply_async(*args, **options)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the messages that were made after others."""
    seen: list[str] = []
    result = Composed.result

    def noting(self: Composed, make: Any, task_id: str) -> Any:
        seen.append(task_id)
        return result(self, make, task_id)

    monkeypatch.setattr(Composed, "result", noting)
    return seen


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Celery]:
    """An app with durable tasks, and a backend that wants to know of each call."""
    made = make_app("shop", broker=redis_url, result_backend=redis_url, sidejob_database_url=database_url)

    @made.task(name="mail", durable=True, shared=False)
    def mail(*to: object, **about: object) -> None:
        pass

    @made.task(name="letter", durable=True, shared=False, ignore_result=True, serializer="yaml")
    def letter(to: object) -> None:
        pass

    made.finalize()
    yield made
    made.sidejob.close()
    made.close()


def rows(app: Celery, database_url: str, signatures: Sequence[Signature]) -> list[tuple[Any, ...]]:
    """What `send_many` keeps; it is rolled back."""
    with psycopg.connect(database_url) as connection:
        app.sidejob.send_many(signatures, transaction=connection)
        found = taken(connection)
        connection.rollback()
    return found


def taken(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """What is kept, which is so no longer."""
    found = connection.execute(
        "WITH gone AS (DELETE FROM sidejob.messages RETURNING *) "
        "SELECT task_id, task, queue, publication, body, expires_at, due_at > now() FROM gone ORDER BY task_id"
    )
    return found.fetchall()


ALIKE: dict[str, Callable[[Any], Signature]] = {
    "nothing": lambda app: app.tasks["mail"].s(),
    "arguments": lambda app: app.tasks["mail"].s(1, [2.5, None], {"a": QUOTED}, about=QUOTED, more=(1, 2)),
    "envelopes": lambda app: app.tasks["mail"].s({"__type__": 1, "__value__": 2}, datetime(2026, 1, 1)),
    "much": lambda app: app.tasks["mail"].s("x" * 5000, list(range(1000))),
    "options": lambda app: app.tasks["mail"].s(1).set(eta=LATER, headers={"mine": QUOTED}, priority=7),
    "compressed": lambda app: app.tasks["mail"].s("x" * 100).set(compression="zlib", queue="letters"),
    "pickled": lambda app: app.tasks["mail"].s({1, 2}).set(serializer="pickle"),
    "followed": lambda app: app.tasks["mail"].s(1).set(
        link=app.tasks["letter"].s(), link_error=app.tasks["letter"].si(3)
    ),
    "of its own": lambda app: app.tasks["letter"].s("me"),
    "stamped": lambda app: app.tasks["mail"].s(1).set(stamped_headers=["mark"], mark="x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALIKE)
def test_each_is_what_celery_makes(app: Celery, database_url: str, again: list[str], kind: str) -> None:
    ids = ("1-first", "2-empty", "3 \N{SNOWMAN} %", "4-last")
    signatures = [ALIKE[kind](app).clone().set(task_id=task_id) for task_id in ids]
    signatures[1].update(args=(), kwargs={})
    if kind == "of its own":  # it takes one argument
        del signatures[1]

    composed = rows(app, database_url, signatures)
    assert again == [signature.options["task_id"] for signature in signatures[1:]]
    with looking():
        by_celery = rows(app, database_url, signatures)

    assert len(again) == len(signatures) - 1, "with a receiver Celery makes each"
    assert composed == by_celery


SINGLE: dict[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("mail", {}),
    "of its own": ("letter", {}),
    "options": ("mail", {"queue": "letters", "priority": 7, "time_limit": 5, "shadow": QUOTED, "compression": "zlib"}),
    "pickled": ("mail", {"serializer": "pickle", "ignore_result": True}),
}
CALLS: list[tuple[Any, Any]] = [((1,), None), ((QUOTED,), {}), (["x" * 5000], None), (({"a": 1},), {}), ((1,), {})]


@pytest.mark.parametrize("kind", SINGLE)
def test_single_calls_are_what_celery_makes(app: Celery, database_url: str, again: list[str], kind: str) -> None:
    name, options = SINGLE[kind]

    def call() -> list[tuple[Any, ...]]:
        with ThreadPoolExecutor(1) as thread, psycopg.connect(database_url, autocommit=True) as connection:
            for number, (args, kwargs) in enumerate(CALLS):
                called = partial(app.tasks[name].apply_async, args, kwargs, task_id=f"{number} \N{SNOWMAN}", **options)
                thread.submit(called).result() if number % 2 else called()
            return taken(connection)

    composed = call()
    assert len(again) == len(CALLS) - 1
    with looking():
        by_celery = call()

    assert len(again) == len(CALLS) - 1, "with a receiver Celery makes each"
    replies = {one[3][one[3].index("reply_to") :] for one in composed}
    assert [without_reply(row) for row in composed] == [without_reply(row) for row in by_celery]
    assert len(replies) == 2, "each thread has its own address for replies"


def without_reply(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:3], re.sub(r'reply_to[\\": ]+[0-9a-f-]{36}', "", row[3]), *row[4:])


ONE_BY_ONE: dict[str, Mapping[str, Any]] = {
    "countdown": {"countdown": 5},
    "expires": {"expires": 60},
    "headers": {"headers": {"mine": 1}},
    "link": {"link": {"task": "letter", "args": [1]}},
    "root": {"root_id": "root"},
    "key": {"unique": "key"},
}


@pytest.mark.parametrize("option", ONE_BY_ONE)
def test_celery_makes_calls_that_have_a_time_or_a_follower(app: Celery, again: list[str], option: str) -> None:
    for _ in range(3):
        app.tasks["mail"].delay(1)
        app.tasks["mail"].apply_async((1,), **ONE_BY_ONE[option])

    assert len(again) == 2, "calls without the option are still made after the first of them"


def test_wrong_calls_are_celerys_to_refuse(app: Celery, again: list[str]) -> None:
    app.tasks["mail"].delay(1)

    for args, kwargs, error in (((), {"task_id": "a\0b"}, InvalidValueError), ("text", {}, TypeError)):
        with pytest.raises(error):
            app.tasks["mail"].apply_async(args, **kwargs)
    with pytest.raises(InvalidValueError, match="cannot be encoded"):
        app.tasks["mail"].delay(object())


def test_few_messages_of_a_task_serve_for_others(app: Celery, again: list[str]) -> None:
    for _ in range(2):
        for number in range(MOST_MODELS + 2):
            app.tasks["mail"].apply_async((1,), priority=number)

    assert len(again) == MOST_MODELS


def test_messages_made_before_a_fork_serve_no_longer(
    app: Celery, again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name another process as their origin."""
    app.tasks["mail"].delay(1)
    ((model,),) = app.amqp.models.values()
    monkeypatch.setattr(model, "_made_for", (1, *model._made_for[1:]))

    for _ in range(3):
        app.tasks["mail"].delay(1)

    assert len(again) == 2
    assert model not in app.amqp.models["mail"]


def test_what_a_task_and_its_app_say_later_counts(app: Celery, database_url: str, again: list[str]) -> None:
    mail = app.tasks["mail"]
    for _ in range(2):
        mail.delay(1)
    mail.capacity = CapacityPool("mails", 10)
    in_pool = [mail.delay(1).id for _ in range(2)]
    app.conf.task_default_queue = "others"
    elsewhere = [mail.delay(1).id for _ in range(2)]

    assert len(again) == 3
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT task_id, pool, queue FROM sidejob.messages").fetchall()
    found = {task_id: (pool, queue) for task_id, *(pool, queue) in rows}
    assert [found[task_id] for task_id in in_pool] == [("mails", "celery")] * 2
    assert [found[task_id] for task_id in elsewhere] == [("mails", "others")] * 2


def test_tasks_and_options_may_take_turns(app: Celery, database_url: str, again: list[str]) -> None:
    mail, letter = app.tasks["mail"], app.tasks["letter"]
    signatures = [mail.s(1), letter.s(1), mail.s(2), letter.s(2), mail.s(3).set(queue="letters"), mail.s(4)]
    for number, signature in enumerate(signatures):
        signature.set(task_id=str(number))

    composed = rows(app, database_url, signatures)

    assert again == ["2", "3"], "each change of options is made by Celery"
    with looking():
        assert composed == rows(app, database_url, signatures)


def test_results_are_celerys(app: Celery, again: list[str]) -> None:
    results = app.sidejob.send_many([app.tasks["mail"].s(n) for n in range(3)] + [app.tasks["letter"].s(1)] * 2)

    assert len(again) == 3
    assert [result.ignored for result in results] == [False] * 3 + [True] * 2
    assert len({result.id for result in results}) == 5
    subscribed = set(app.backend.result_consumer._pubsub.channels)
    asked = [result.id for result in results if app.backend.get_key_for_task(result.id) in subscribed]
    assert asked == [result.id for result in results[:3]]


def connect(signal: str) -> Callable[..., None]:
    def look(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(getattr(signals, signal), "receivers", [(("mine", 0), lambda **_: None)])

    return look


def wrapped(owner: Any, name: str) -> Callable[..., None]:
    def look(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(owner, name)

        @wraps(method)
        def traced(*args: Any, **options: Any) -> Any:
            return method(*args, **options)

        monkeypatch.setattr(owner, name, traced)

    return look


def wrapped_on_the_app(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped(app, "send_task")(app, monkeypatch)


def routed(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    app.conf.task_routes = [lambda name, args, kwargs, options, task=None: {"queue": f"of-{args[0]}"}]
    monkeypatch.setattr(app.amqp, "_rtable", None)
    monkeypatch.setattr(app.amqp, "router", app.amqp.Router())


LOOKS: dict[str, Callable[..., None]] = {
    "a receiver before": connect("before_task_publish"),
    "a receiver after": connect("after_task_publish"),
    "a receiver of old": connect("task_sent"),
    "a traced task": wrapped(Task, "apply_async"),
    "a traced app": wrapped(Celery, "send_task"),
    "a traced app of one": wrapped_on_the_app,
    "a traced signature": wrapped(Signature, "apply_async"),
    "traced messages": wrapped(AMQP, "as_task_v2"),
    "events": lambda app, _: app.conf.update(task_send_sent_event=True),
    "a route": routed,
}


@pytest.mark.parametrize("look", LOOKS)
def test_celery_makes_each_where_something_looks(
    app: Celery, again: list[str], monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    LOOKS[look](app, monkeypatch)

    results = app.sidejob.send_many(app.tasks["mail"].s(number) for number in range(3))
    outer = look in ("a traced task", "a traced signature", "a traced app of one")  # these see a single call themselves
    for number in range(0 if outer else 3):
        app.tasks["mail"].delay(number)

    assert again == []
    assert len(results) == 3


@pytest.mark.parametrize("own", ["amqp", "task", "shadow", "down"])
def test_celery_makes_each_of_a_project_that_may_look(
    database_url: str, redis_url: str, again: list[str], own: str
) -> None:
    settings = {"sidejob_on_store_down": "publish"} if own == "down" else {}
    app = make_app("own", broker=redis_url, sidejob_database_url=database_url, **settings)
    if own == "amqp":
        app.amqp.__class__ = type("KeepingOwn", (type(app.amqp), OwnAMQP), {})
    options: dict[str, Any] = {"base": Traced} if own == "task" else {}
    if own == "shadow":
        options["shadow_name"] = lambda task, args, kwargs, options: f"mail to {args[0]}"

    @app.task(name="mail", durable=True, shared=False, **options)
    def mail(to: object) -> None:
        pass

    assert len(app.sidejob.send_many(mail.s(number) for number in range(3))) == 3
    for number in range(3):
        mail.delay(number)
    assert again == []
    app.sidejob.close()
    app.close()

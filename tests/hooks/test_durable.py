"""What is kept of a durable task's message, and which tasks are durable; in this process, without a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, signals

from celery_sidejob import DurableTask, SideJob
from celery_sidejob.hooks.durable import is_durable
from celery_sidejob.hooks.durable_task import mark


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Celery]:
    """An app with a store and a broker, to which nobody listens."""
    made = Celery("shop", broker=redis_url, set_as_current=False)
    made.conf.update(sidejob_database_url=database_url, sidejob_durable_tasks=["shop.*"], sidejob_lost_after=0.05)
    SideJob(made)
    yield made
    made.sidejob.close()
    made.close()


def published(app: Celery, queue: str = "celery") -> list[dict[str, Any]]:
    """What is in the broker, the oldest first."""
    with redis.Redis.from_url(app.conf.broker_url) as client:
        return [json.loads(text) for text in reversed(client.lrange(queue, 0, -1))]


def test_what_the_store_publishes_again_are_the_same_bytes_without_a_signal(app: Celery) -> None:
    @app.task(name="shop.mail", durable=True, shared=False)
    def mail(to: str) -> None:
        pass

    sent: list[str] = []

    def trace(headers: dict[str, Any], **_: Any) -> None:
        headers["traceparent"] = f"trace-{len(sent)}"
        sent.append(headers["id"])

    signals.before_task_publish.connect(trace)
    try:
        mail.apply_async(("me",), priority=3, compression="zlib", headers={"mine": {"a": 1}}, expires=600)
        for _ in range(3):  # publish; strike; publish
            with redis.Redis.from_url(app.conf.broker_url) as client:
                known = sum(client.llen(key) for key in client.keys("celery*") if client.type(key) == b"list")
            if known > 1:
                break
            app.sidejob.runtime.connections.run(_due())
            app.sidejob.poll()
    finally:
        signals.before_task_publish.disconnect(trace)

    with redis.Redis.from_url(app.conf.broker_url) as client:
        (key,) = [key for key in client.keys("celery*") if client.type(key) == b"list"]
    first, second = published(app, key.decode())
    assert first["body"] == second["body"]
    assert second["headers"].pop("sidejob_republished") is True
    assert first["headers"] == second["headers"]
    assert first["headers"]["traceparent"] == "trace-0"
    assert first["headers"]["mine"] == {"a": 1}
    assert first["properties"]["priority"] == second["properties"]["priority"] == 3
    assert len(sent) == 1


def _due() -> Any:
    from celery_sidejob.store.statement import Statement

    return Statement("UPDATE {messages} SET look_at = now() - interval '1 s'")


def test_which_tasks_are_durable(app: Celery) -> None:
    @app.task(name="shop.by_name", shared=False)
    def by_name() -> None:
        pass

    @app.task(name="shop.not_this_one", durable=False, shared=False)
    def not_this_one() -> None:
        pass

    @app.task(name="other", durable=True, shared=False)
    def other() -> None:
        pass

    @app.task(name="another", base=DurableTask, shared=False)
    def another() -> None:
        pass

    @app.task(name="plain", shared=False)
    def plain() -> None:
        pass

    app.finalize()
    names = ["shop.by_name", "other", "another", "shop.not_this_one", "plain", "celery.chord_unlock"]
    assert [is_durable(app, name) for name in names] == [True, True, True, False, False, False]
    assert [isinstance(app.tasks[name], DurableTask) for name in names] == [True, True, True, False, False, False]
    assert is_durable(app, "shop.elsewhere"), "a task this client does not know"


@pytest.mark.parametrize(
    ("glob", "durable"), [("*", False), ("celery.chord_unlock", True), ("celery_sidejob.*", False)]
)
def test_celery_s_own_tasks_are_meant_by_their_name_alone(database_url: str, glob: str, durable: bool) -> None:
    app = Celery("own", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url=database_url, sidejob_durable_tasks=[glob])
    SideJob(app)

    assert is_durable(app, "celery.chord_unlock") is durable


def test_eager_mode_needs_no_store() -> None:
    app = Celery("eager", broker="memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing")
    SideJob(app)

    @app.task(durable=True, shared=False)
    def plus(left: int, right: int = 1) -> int:
        return left + right

    mark(app)

    assert plus.delay(1).get() == 2
    assert (plus.s(1) | plus.s(5)).apply().get() == 7
    assert plus(2, 3) == 5


def test_the_project_s_own_class_stays_in_place(app: Celery) -> None:
    called: list[str] = []

    class Own(app.Task):  # type: ignore[name-defined,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append("around")
            return super().__call__(*args, **kwargs)

        def before_start(self, *_: Any) -> None:
            called.append("before")

    @app.task(name="shop.own", base=Own, shared=False)
    def own() -> str:
        return "done"

    app.finalize()
    task = app.tasks["shop.own"]

    assert isinstance(task, DurableTask)
    assert isinstance(task, Own)
    assert task.apply().get() == "done"
    assert called == ["before", "around"]

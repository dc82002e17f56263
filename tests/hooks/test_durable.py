"""What is kept of a durable task's message, and which tasks are durable; in this process, without a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery, signals
from sqlalchemy import create_engine

from celery_sidejob import DurableTask, IllegalMoveError, InvalidValueError, JobNotFoundError, SideJob
from celery_sidejob.hooks.durable import is_durable
from celery_sidejob.hooks.durable_task import mark
from celery_sidejob.store.statement import Statement
from tests.tools.waiting import wait_until


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


# -- transactions, and what waits in the store -----------------------------------------------------------------------


def kept(app: Celery) -> list[tuple[Any, ...]]:
    """The messages in the store: (task id, published, held back for its eta)."""
    rows = app.sidejob.runtime.connections.run(
        Statement(
            "SELECT task_id, published_at IS NOT NULL AS sent, look_at > now() + interval '1 min' AS waits"
            " FROM {messages}"
        )
    )
    return sorted(tuple(row) for row in rows)


@pytest.fixture
def mail(app: Celery) -> Any:
    """A durable task."""

    @app.task(name="shop.mail", durable=True, shared=False)
    def mail(to: str) -> None:
        pass

    app.conf.sidejob_lost_after = 30
    app.sidejob.poll()  # its first look at a new broker takes it for an emptied one
    return app.tasks["shop.mail"]


def test_a_task_shares_the_fate_of_the_transaction_it_is_called_in(app: Celery, mail: Any, database_url: str) -> None:
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        mail.apply_async(("kept",), task_id="kept", transaction=connection)
        inner = connection.begin_nested()
        mail.apply_async(("inner",), task_id="inner", transaction=connection)
        inner.rollback()
        assert (kept(app), published(app)) == ([], [])
    with engine.connect() as connection:
        mail.apply_async(("gone",), task_id="gone", transaction=connection)
        connection.rollback()
    engine.dispose()

    wait_until(
        lambda: kept(app) == [("kept", True, False)], message="the committed task, and no other, to be published"
    )
    assert [message["headers"]["id"] for message in published(app)] == ["kept"]


def test_a_commit_that_nobody_tells_of_is_published_by_the_sweeper(app: Celery, mail: Any, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        mail.apply_async(("me",), task_id="one", transaction=connection)
        connection.commit()
    assert (kept(app), published(app)) == ([("one", False, False)], [])

    app.sidejob.runtime.connections.run(_due())
    app.sidejob.poll()

    assert kept(app) == [("one", True, False)]
    assert len(published(app)) == 1


def test_what_is_due_beyond_the_horizon_waits_in_the_store(app: Celery, mail: Any) -> None:
    mail.apply_async(("far",), task_id="far", countdown=365 * 86400)
    mail.apply_async(("near",), task_id="near", countdown=5)
    assert kept(app) == [("far", False, True), ("near", True, False)]
    app.sidejob.poll()
    assert [message["headers"]["id"] for message in published(app)] == ["near"]

    app.sidejob.runtime.connections.run(_due())
    app.sidejob.poll()

    assert {message["headers"]["id"] for message in published(app)} == {"near", "far"}


def test_what_expires_while_it_waits_in_the_store_is_dead(app: Celery, mail: Any) -> None:
    mail.apply_async(("far",), task_id="far", countdown=3600, expires=60)
    app.sidejob.runtime.connections.run(_due())
    app.sidejob.runtime.connections.run(Statement("UPDATE {messages} SET expires_at = now() - interval '1 s'"))

    app.sidejob.poll()

    assert published(app) == []
    assert [(entry.task_id, entry.reason) for entry in app.sidejob.dead] == [("far", "expired")]


def test_tasks_that_are_made_later_are_durable_too(app: Celery) -> None:
    app.finalize()

    @app.task(name="shop.late", shared=False)
    def late() -> None:
        pass

    assert isinstance(app.tasks["shop.late"], DurableTask)


# -- the dead set ----------------------------------------------------------------------------------------------------


@pytest.fixture
def buried(app: Celery, mail: Any) -> Celery:
    """An app in whose dead set there are three mails that expired and two that were lost."""
    for number in range(5):
        mail.apply_async((number,), task_id=f"mail{number}", expires=600)
    app.sidejob.runtime.connections.run(
        Statement(
            "UPDATE {messages} SET published_at = NULL, look_at = now(),"
            " doom = CASE WHEN task_id < 'mail3' THEN 'expired' ELSE 'lost' END"
        )
    )
    app.sidejob.poll()
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.flushdb()
    return app


def test_entries_are_listed_grouped_and_retried_by_group(buried: Celery) -> None:
    dead = buried.sidejob.dead
    assert dead.groups() == {"shop.mail: TaskRevokedError": 3, "shop.mail: WorkerLostError": 2}
    assert [entry.task_id for entry in dead.list(group="shop.mail: WorkerLostError")] == ["mail3", "mail4"]
    assert [entry.task_id for entry in dead.list(limit=2, after=dead.list(limit=1)[0].id)] == ["mail1", "mail2"]
    assert dead.list(task="other") == dead.list(queue="other") == []

    assert dead.retry_all(group="shop.mail: TaskRevokedError", limit=2) == 2

    assert [entry.task_id for entry in dead] == ["mail2", "mail3", "mail4"]
    again = {message["headers"]["id"]: message["headers"] for message in published(buried)}
    assert set(again) == {"mail0", "mail1"}
    assert again["mail0"]["expires"] is None, "a person wants it in spite of its age"
    assert again["mail0"]["sidejob_durable"] == {"v": 1, "n": 2}
    assert dead.retry_all() == 3
    assert len(dead) == 0


def test_what_waits_again_is_not_retried_twice(buried: Celery, mail: Any) -> None:
    (first, *_) = buried.sidejob.dead.list(limit=1)
    mail.apply_async(("me",), task_id=first.task_id)

    with pytest.raises(IllegalMoveError, match="waits or runs already"):
        buried.sidejob.dead.retry(first.id)
    assert buried.sidejob.dead.retry_all() == 4
    assert [entry.id for entry in buried.sidejob.dead] == [first.id]


def test_entries_are_deleted_and_purged(buried: Celery) -> None:
    dead = buried.sidejob.dead
    (first, *_) = dead.list(limit=1)
    assert dead.delete(first.id) is True
    with pytest.raises(JobNotFoundError):
        dead.delete(first.id)
    assert dead.purge(older_than=60) == 0
    assert dead.purge(keep=3) == 1
    assert [entry.task_id for entry in dead] == ["mail2", "mail3", "mail4"]
    assert dead.purge(older_than=timedelta(0)) == 3
    with pytest.raises(InvalidValueError, match="older_than= or keep="):
        dead.purge()

"""What is kept of a durable task's message, and which tasks are durable; in this process, without a worker."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery, signals
from celery.app.trace import trace_task
from kombu import Exchange, Queue
from kombu.serialization import register, unregister

from celery_sidejob import (
    DurableTask,
    IllegalMoveError,
    InvalidValueError,
    JobNotFoundError,
    SettingsError,
    task_buried,
)
from celery_sidejob.hooks.task_options import is_durable
from celery_sidejob.hooks.tasks import durable_run
from celery_sidejob.hooks.tasks.durable_task import mark
from celery_sidejob.hooks.tasks.present import RUNS
from celery_sidejob.inspection.tasks import TaskViews
from celery_sidejob.model.durable import Death
from celery_sidejob.model.loss import Loss
from celery_sidejob.operations.ledger import burials
from celery_sidejob.operations.ledger.durable_runs import Run
from celery_sidejob.store.statement import Statement
from tests.tools.apps import make_app
from tests.tools.contents import NOTHING
from tests.tools.crash_points import Arm, lost
from tests.tools.monitor import Events
from tests.tools.waiting import wait_until


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Celery]:
    """An app with a store and a broker, to which nobody listens."""
    made = make_app(
        "shop",
        broker=redis_url,
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["shop.*"],
        sidejob_lost_after=0.05,
        sidejob_redact=lambda text: text.replace("hunter2", "[hidden]"),
    )
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
    return Statement("UPDATE {messages} SET next_check_at = now() - interval '1 s'")


# -- what is kept ----------------------------------------------------------------------------------------------------


def rows(app: Celery) -> dict[str, Any]:
    """The rows of all kept messages, by task id, once it is written which were published: that is put off."""
    app.sidejob.runtime.connections.write_behind_now()
    found = app.sidejob.runtime.connections.run(
        Statement(
            "SELECT *, extract(epoch FROM next_check_at - greatest(due_at, published_at))::float AS looked_at_after_s,"
            " extract(epoch FROM due_at - now())::float AS due_in_s FROM {messages}"
        )
    )
    return {row.task_id: row for row in found}


def test_each_way_to_call_keeps_the_whole_message_in_one_row(app: Celery, mail: Any) -> None:
    app.conf.task_routes = {"shop.routed": {"queue": "post"}}
    mail.apply_async(("me",), {"cc": ["you"]}, task_id="now")
    mail.apply_async(("me",), task_id="soon", countdown=10)
    mail.apply_async(("me",), task_id="then", eta=datetime.now(UTC) + timedelta(seconds=20))
    mail.apply_async(("me",), task_id="queued", queue="letters", expires=600, priority=7)
    app.send_task("shop.routed", ("me",), task_id="routed")
    app.send_task("plain", ("me",), task_id="plain")
    plain = mail.delay("me")

    found = rows(app)
    assert set(found) == {"now", "soon", "then", "queued", "routed", plain.id}
    assert {task_id: (row.queue, row.task) for task_id, row in found.items() if row.queue != "celery"} == {
        "queued": ("letters", "shop.mail"), "routed": ("post", "shop.routed"),
    }  # fmt: skip
    assert json.loads(bytes(found["now"].body))[:2] == [["me"], {"cc": ["you"]}]
    assert {row.locked_by for row in found.values()} == {None}
    lost_after = app.sidejob.settings.lost_after
    assert [round(row.looked_at_after_s) for row in found.values()] == [lost_after] * 6, "after it is due"
    assert -5 < found["now"].due_in_s <= 0
    assert 5 < found["soon"].due_in_s <= 10
    assert 15 < found["then"].due_in_s <= 20
    about = json.loads(json.loads(found["queued"].publication)["about"])
    assert about["headers"]["expires"] is not None
    assert (about["properties"]["priority"], found["queued"].expires_at is not None) == (7, True)


def test_the_caller_s_own_things_stay_as_they_were(app: Celery, mail: Any) -> None:
    args, kwargs, headers, options = ["me"], {"cc": ["you"]}, {"mine": [1]}, {"priority": 3}
    signature = mail.s("me", cc=["you"]).set(headers=headers, **options)
    before = json.dumps([args, kwargs, headers, options, signature])

    mail.apply_async(args, kwargs, headers=headers, **options)
    signature.apply_async()

    assert json.dumps([args, kwargs, headers, options, signature]) == before
    assert len(rows(app)) == 2


def test_an_id_is_one_task_until_that_is_finished(app: Celery, mail: Any) -> None:
    mail.apply_async(("me",), task_id="one")
    before = rows(app)["one"]

    with pytest.raises(InvalidValueError, match="is taken"):
        mail.apply_async(("you",), task_id="one", countdown=1000)

    assert (before.body, before.next_check_at) == (rows(app)["one"].body, rows(app)["one"].next_check_at)
    assert len(published(app)) == 1


def test_without_sidejob_or_not_durable_it_is_celery_s_own(redis_url: str, app: Celery) -> None:
    bare = Celery("bare", broker=redis_url, set_as_current=False)

    @bare.task(name="shop.bare", durable=True, shared=False)
    def at_bare() -> None:
        pass

    @app.task(name="plain", shared=False)
    def plain() -> None:
        pass

    for task in (at_bare, plain):
        task.delay()
    bare.close()

    assert ["sidejob_durable" in message["headers"] for message in published(app)] == [False, False]
    assert rows(app) == {}


def test_a_task_id_that_waits_is_refused_also_with_the_same_arguments(app: Celery) -> None:
    at = datetime.now(UTC) + timedelta(seconds=20)
    for task_id, options in {"now": {}, "then": {"eta": at}}.items():
        app.send_task("shop.mail", ("me",), task_id=task_id, **options)
        with pytest.raises(InvalidValueError, match="is taken"):
            app.send_task("shop.mail", ("me",), task_id=task_id, **options)

    assert [message["headers"]["id"] for message in published(app)] == ["now", "then"]


def test_a_durable_task_needs_a_store(redis_url: str) -> None:
    app = make_app("storeless", broker=redis_url, sidejob_durable_tasks=["shop.*"])

    with pytest.raises(SettingsError, match="sidejob_database_url is not set"):
        app.send_task("shop.mail")
    with pytest.raises(SettingsError, match="sidejob_database_url is not set"):
        app.sidejob.poll()
    assert "celery-sidejob-poll" not in app.conf.beat_schedule
    assert published(app) == []
    app.close()


def signed(value: Any) -> bytes:
    """Bytes that are no text, which nobody without the key can make or change."""
    data = pickle.dumps(value)
    return hmac.digest(b"key", data, hashlib.sha256) + data


@pytest.mark.parametrize("compression", [None, "bzip2"])
@pytest.mark.parametrize("serializer", ["json", "yaml", "pickle", "signed"])
def test_any_serializer_and_compression(app: Celery, mail: Any, serializer: str, compression: str | None) -> None:
    register("signed", signed, None, "application/x-signed", "binary")
    try:
        mail.apply_async(("mé",), serializer=serializer, compression=compression)
    finally:
        unregister("signed")
    app.sidejob.runtime.connections.run(Statement("UPDATE {messages} SET next_check_at = now(), published_at = NULL"))

    app.sidejob.poll()

    first, second = published(app)
    assert second["headers"].pop("sidejob_republished") is True
    for message in (first, second):
        del message["properties"]["delivery_tag"]
    assert first == second


def test_a_message_goes_again_where_its_publisher_sent_it(app: Celery) -> None:
    topic = Exchange("news", type="topic")
    app.conf.task_queues = [Queue("celery"), Queue("sports", topic, routing_key="news.sports.#")]
    app.send_task("shop.mail", queue="sports", routing_key="news.sports.tennis")
    (row,) = rows(app).values()
    assert row.queue == "sports"
    app.sidejob.runtime.connections.run(Statement("UPDATE {messages} SET next_check_at = now(), published_at = NULL"))

    app.sidejob.poll()

    first, second = published(app, "sports")
    for message in (first, second):
        where = message["properties"]["delivery_info"]
        assert (where["exchange"], where["routing_key"]) == ("news", "news.sports.tennis")


@pytest.mark.parametrize(
    ("options", "queue"),
    [
        ({"exchange": "media", "routing_key": "image"}, "images"),
        ({"exchange": Exchange("media", "direct"), "routing_key": "image"}, "images"),
        ({"exchange": "all", "routing_key": "any"}, "told"),
        ({"exchange": "all"}, "celery"),  # Celery itself heeds no exchange without a routing key
        ({"queue": "films", "exchange": "media", "routing_key": "image.of.film"}, "films"),
        ({"queue": "images"}, "images"),
        ({"exchange": "unheard of", "routing_key": "image"}, "celery"),
    ],
)
def test_a_message_is_kept_under_the_name_of_the_queue_that_its_exchange_sends_it_to(
    app: Celery, options: dict[str, Any], queue: str
) -> None:
    """Which is where the broker is asked for it; `queue=` says so where the app does not know."""
    media = Exchange("media", "direct")
    app.conf.task_queues = [
        Queue("celery"), Queue("images", media, routing_key="image"), Queue("told", Exchange("all", "fanout")),
    ]  # fmt: skip

    app.send_task("shop.mail", **options)

    (row,) = rows(app).values()
    about = json.loads(json.loads(row.publication)["about"])
    assert (row.queue, about["declare"]) == (queue, [queue])


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, "dead"),
        ({"acks_late": True}, "dead"),
        ({"acks_late": True, "reject_on_worker_lost": True}, "requeue"),
        ({"acks_late": True, "reject_on_worker_lost": True, "on_lost": "dead"}, "dead"),
        ({"on_lost": "requeue"}, "requeue"),
    ],
)
def test_what_becomes_of_a_lost_run(app: Celery, options: dict[str, Any], policy: str) -> None:
    @app.task(name="shop.lost", shared=False, **options)
    def lost() -> None:
        pass

    app.finalize()
    assert app.tasks["shop.lost"].lost_policy == policy


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


def test_a_task_that_is_only_ever_sent_by_its_name_is_kept(app: Celery) -> None:
    @app.task(name="other.mail", durable=True, shared=False)
    def mail() -> None:
        pass

    app.send_task("other.mail", task_id="one")

    rows = app.sidejob.runtime.connections.run(Statement("SELECT task_id FROM {messages}"))
    assert [row.task_id for row in rows] == ["one"]


@pytest.mark.parametrize(
    ("glob", "durable"), [("*", False), ("celery.chord_unlock", True), ("celery_sidejob.*", False)]
)
def test_celery_s_own_tasks_are_meant_by_their_name_alone(database_url: str, glob: str, durable: bool) -> None:
    app = make_app("own", sidejob_database_url=database_url, sidejob_durable_tasks=[glob])

    assert is_durable(app, "celery.chord_unlock") is durable


def test_eager_mode_needs_no_store() -> None:
    app = make_app("eager", task_always_eager=True, sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing")

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


# -- what waits in the store -----------------------------------------------------------------------------------------


def kept(app: Celery) -> list[tuple[Any, ...]]:
    """The messages in the store: (task id, published, held back for its eta)."""
    rows = app.sidejob.runtime.connections.run(
        Statement(
            "SELECT task_id, published_at IS NOT NULL AS sent, next_check_at > now() + interval '1 min' AS waits"
            " FROM {messages}"
        )
    )
    return sorted(tuple(row) for row in rows)


@pytest.fixture
def mail(app: Celery) -> Any:
    """A durable task."""

    @app.task(name="shop.mail", durable=True, shared=False)
    def mail(to: str, cc: Any = ()) -> None:
        pass

    app.conf.sidejob_lost_after = 30
    app.sidejob.poll()  # its first look at a new broker takes it for an emptied one
    return app.tasks["shop.mail"]


def test_what_is_due_beyond_the_horizon_waits_in_the_store(app: Celery, mail: Any) -> None:
    mail.apply_async(("far",), task_id="far", countdown=365 * 86400)
    mail.apply_async(("near",), task_id="near", countdown=5)
    wait_until(lambda: kept(app) == [("far", False, True), ("near", True, False)], message="what is out to be marked")
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
            "UPDATE {messages} SET published_at = NULL, next_check_at = now(),"
            " doom = CASE WHEN task_id < 'mail3' THEN 'expired' ELSE 'lost' END, on_lost = 'dead'"
        )
    )
    app.sidejob.poll()
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.flushdb()
    return app


def test_entries_are_listed_grouped_and_retried_by_group(buried: Celery) -> None:
    dead = buried.sidejob.dead
    assert dead.groups() == {"TaskRevokedError": 3, "WorkerLostError": 2}
    assert [entry.task_id for entry in dead.list(group="WorkerLostError")] == ["mail4", "mail3"]
    assert [entry.task_id for entry in dead.list(limit=2, after=dead.list(limit=1)[0].id)] == ["mail1", "mail2"]
    assert dead.list(task="other") == dead.list(queue="other") == []

    assert dead.retry_all(group="TaskRevokedError", limit=2) == 2

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
    with pytest.raises(InvalidValueError, match="older_than=, keep=, group=, task=, queue= or reason="):
        dead.purge()


def test_entries_are_listed_retried_and_purged_by_their_reason(buried: Celery) -> None:
    """All entries with one reason go with one call, and the rest is left for a person."""
    dead = buried.sidejob.dead
    by_reason: dict[str, list[str | None]] = {}
    for entry in dead:
        by_reason.setdefault(entry.reason, []).append(entry.task_id)
    assert by_reason.keys() == {"expired", "lost"}
    for reason, task_ids in by_reason.items():
        assert [entry.task_id for entry in dead.list(reason=reason)] == task_ids
        assert dead.count(reason=reason) == len(task_ids)
        for entry in dead.list(reason=reason):
            assert entry in dead.list(group=entry.group, reason=reason)
            assert entry in dead.list(task=entry.task, queue=entry.queue, reason=reason)
    for which in ({}, {"group": "WorkerLostError"}, {"task": dead.list(limit=1)[0].task}):
        assert dead.list(**which, reason="revoked") == []
    assert (dead.purge(reason="revoked"), dead.retry_all(reason="revoked")) == (0, 0)
    assert dead.purge(reason="lost", older_than=60) == 0
    assert dead.purge(reason="lost", keep=1) == 1, "the newest of all entries is one that was lost"

    assert dead.purge(reason="expired") == 3
    assert [(entry.reason, entry.task_id) for entry in dead] == [("lost", "mail4")]
    assert dead.retry_all(reason="expired") == 0
    assert dead.retry_all(reason="lost") == 1
    assert len(dead) == 0


def bury(app: Celery) -> None:
    """Have all that is kept found to be lost."""
    app.sidejob.runtime.connections.run(
        Statement(
            "UPDATE {messages} SET published_at = NULL, next_check_at = now(), losses = 1, doom = 'lost',"
            " on_lost = 'dead'"
        )
    )
    app.sidejob.poll()


def test_the_secret_in_a_loss_is_hidden(app: Celery, mail: Any) -> None:
    mail.apply_async(("me",), task_id="one")
    kept = Loss.of_body("web:1:a", SystemExit("hunter2")).json
    app.sidejob.runtime.connections.run(Statement("UPDATE {messages} SET last_loss = %(kept)s::json"), kept=kept)
    waiting = TaskViews(app.sidejob.runtime).task("one")
    assert waiting is not None
    bury(app)
    (entry,) = app.sidejob.dead

    assert entry.loss == waiting["last_loss"]
    assert entry.loss["cause"] == "SystemExit('[hidden]')"
    assert "hunter2" not in repr(entry)


def test_an_entry_shows_what_it_was_and_how_often_it_died(app: Celery, mail: Any) -> None:
    mail.apply_async(("me",), {"cc": "hunter2"}, task_id="one")
    bury(app)
    (first,) = app.sidejob.dead
    assert (first.arguments, first.losses, first.history) == ("('me',) {'cc': '[hidden]'}", 1, ())

    for _ in range(11):
        app.sidejob.dead.retry_all()
        bury(app)

    (last,) = app.sidejob.dead
    assert (last.task_id, last.losses, len(last.history)) == ("one", 1, 10), "the last ten are remembered"
    assert [sorted(death) for death in last.history] == [["at", "error", "reason"]] * 10
    assert {(death["reason"], death["error"]) for death in last.history} == {("lost", "WorkerLostError")}
    times = [datetime.fromisoformat(death["at"]) for death in last.history]
    assert times == sorted(times)
    assert first.died_at < times[0] < times[-1] < last.died_at
    assert published(app)[-1]["headers"]["sidejob_deaths"] == list(last.history)


def test_what_cannot_be_read_of_an_entry_hides_no_other(buried: Celery) -> None:
    buried.sidejob.runtime.connections.run(
        Statement("""UPDATE {dead} SET payload = '{"publication": "of a newer version"}' WHERE task_id = 'mail1'""")
    )

    assert [entry.arguments for entry in buried.sidejob.dead] == ["(0,) {}", None, "(2,) {}", "(3,) {}", "(4,) {}"]


def test_each_burial_is_told_of_once_and_a_broken_receiver_is_in_nobody_s_way(
    app: Celery, mail: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[dict[str, Any]] = []

    def broken(**_: Any) -> None:
        raise RuntimeError("the pager is down")

    def tell(**about: Any) -> None:
        about["error"] = app.sidejob.dead.get(about["entry_id"]).error  # it is committed
        told.append(about)

    task_buried.connect(broken)
    task_buried.connect(tell)
    try:
        for number in range(3):
            mail.apply_async((number,), task_id=f"mail{number}")
        bury(app)
        app.sidejob.poll()
    finally:
        task_buried.disconnect(broken)
        task_buried.disconnect(tell)

    assert [(one["task_id"], one["task"], one["job_id"], one["reason"]) for one in told] == [
        (f"mail{number}", "shop.mail", None, "lost") for number in range(3)
    ]  # fmt: skip
    assert all(one["error"].startswith("WorkerLostError") for one in told)
    records = [record for record in caplog.records if "was entered in the dead set" in record.message]
    assert [(record.levelno, record.task_id, record.task) for record in records] == [
        (logging.ERROR, f"mail{number}", "shop.mail") for number in range(3)
    ]  # fmt: skip


EXPLODED: list[str] = []


class Bomb:
    """Goes off when it is unpickled."""

    def __reduce__(self) -> Any:
        return EXPLODED.append, ("boom",)


def test_taking_a_message_out_of_the_dead_set_decodes_nothing(app: Celery, mail: Any) -> None:
    assert "pickle" not in app.conf.accept_content
    mail.apply_async((Bomb(),), serializer="pickle")
    bury(app)
    with redis.Redis.from_url(app.conf.broker_url) as client:
        client.flushdb()

    assert app.sidejob.dead.retry_all() == 1

    (message,) = published(app)
    assert message["content-type"] == "application/x-python-serialize"
    assert EXPLODED == []


@pytest.mark.parametrize("answer", ["heard", "lost"])
def test_a_burial_is_told_once_with_its_entry(app: Celery, at: Arm, answer: str) -> None:
    told: list[Any] = []

    def note(entry_id: int, task_id: str, reason: str, **_: Any) -> None:
        told.append((entry_id, task_id, reason))

    result = app.send_task("shop.mail", task_id="one")
    runtime = app.sidejob.runtime
    if answer == "lost":
        at("durable-bury:after-commit", lost)
    task_buried.connect(note)
    try:
        for _ in range(2):
            burials.fail(runtime, (result.id, 1), Death("failed", "ValueError: no"), by="worker", worker_id=0)
    finally:
        task_buried.disconnect(note)

    (entry,) = app.sidejob.dead
    assert told == [(entry.id, "one", "failed")]


def test_what_is_shown_of_the_dead_is_redacted(database_url: str, redis_url: str) -> None:
    made = make_app(
        "shop",
        broker=redis_url,
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["shop.*"],
        sidejob_redact=lambda text: str(text).replace("secret", "…"),
    )
    made.send_task("shop.mail", ("secret",), task_id="one")
    burials.fail(
        made.sidejob.runtime, ("one", 1), Death("failed", "ValueError: secret", "in secret"), by="worker", worker_id=0
    )  # fmt: skip
    (entry,) = made.sidejob.dead
    assert (entry.error, entry.traceback) == ("ValueError: …", "in …")
    assert "secret" not in repr(entry)
    made.sidejob.close()
    made.close()


def test_a_run_that_is_over_leaves_the_next_one_of_its_task(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry that another thread begins before this one has returned."""
    first, second = (
        Run(("one", generation), "shop.mail", 1, app.sidejob.runtime, NOTHING, moved=True) for generation in (1, 2)
    )
    for of_another_test in [*RUNS]:
        monkeypatch.delitem(RUNS, of_another_test)
    monkeypatch.setitem(RUNS, "one", second)

    for run, left in ((first, {"one": second}), (second, {})):
        durable_run._over(SimpleNamespace(request=SimpleNamespace(sidejob_run=run)), state="RETRY")
        assert left == RUNS


def test_a_header_by_the_name_of_our_run_hinders_no_call_of_its_task(app: Celery) -> None:
    @app.task(name="plain.calling")
    def calling() -> str:
        return str(app.send_task("shop.mail").id)

    request = {"id": "one", "sidejob_run": "forged", "is_eager": False, "called_directly": False}
    traced = trace_task(calling, "one", [], {}, request, app=app)
    assert TaskViews(app.sidejob.runtime).task(traced.retval) is not None


@pytest.mark.parametrize("how", ["alone", "together", "by name"])
def test_the_event_of_a_call_is_redacted(app: Celery, mail: Any, how: str) -> None:
    app.conf.task_send_sent_event = True
    with Events(app.conf.broker_url) as events:
        if how == "together":
            (result,) = app.sidejob.send_many([mail.s("hunter2", cc="hunter2")])
        else:
            call = mail.apply_async if how == "alone" else partial(app.send_task, "shop.mail")
            result = call(("hunter2",), {"cc": "hunter2"})
        wait_until(lambda: events.types(result.id), message="the event")

    (event,) = events.raw
    assert event["type"] == "task-sent"
    assert (event["args"], event["kwargs"]) == ("('[hidden]',)", "{'cc': '[hidden]'}")
    assert "hunter2" not in json.dumps(event)


def test_a_row_that_cannot_be_published_logs_its_traceback_once(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    ids = [app.send_task("shop.mail").id for _ in range(2)]  # the process remembers what it has told
    connections = app.sidejob.runtime.connections
    connections.write_behind_now()
    connections.run(Statement("UPDATE {messages} SET publication = '{\"v\": 99}', published_at = NULL"))
    with caplog.at_level(logging.WARNING, logger="celery_sidejob"):
        for _ in range(3):
            connections.run(_due())
            app.sidejob.poll()

    told = [record for record in caplog.records if "cannot be published" in record.getMessage()]
    assert [bool(record.exc_info or record.exc_text) for record in told] == [True, True, False, False, False, False]
    assert all(any(task_id in record.getMessage() for task_id in ids) for record in told)

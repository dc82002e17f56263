"""What a revocation does in the store, whoever asks for it; in this process, without a worker."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery, group, signals
from celery.app.control import Control
from celery.worker.consumer.events import Events as EventsStep
from kombu.exceptions import OperationalError

from celery_sidejob import SideJob, StoreUnavailableError
from celery_sidejob.hooks.steps import DisconnectionStep
from celery_sidejob.model.durable import Message
from celery_sidejob.model.loss import Loss
from celery_sidejob.operations.ledger import durable_ends, durable_runs
from tests.services.sweep.test_task_sweep import Post, post
from tests.tools.apps import make_app
from tests.tools.monitor import Events
from tests.tools.waiting import wait_until

__all__ = ["post"]


class OwnControl(Control):
    """A project's own control, which notes what goes through it."""

    told: list[str]

    def broadcast(self, command: str, *args: Any, **options: Any) -> Any:
        self.told = [*getattr(self, "told", []), command]
        return super().broadcast(command, *args, **options)

    def pager(self) -> str:
        """What only this class has."""
        return "beep"


class Told:
    """What receivers of Celery's own signal are told."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def __call__(self, request: Any, **options: Any) -> None:
        assert (options["terminated"], options["signum"], options["expired"]) == (False, None, False)
        self.ids.append(request.id)


@pytest.fixture
def told() -> Iterator[Told]:
    """The task ids of which `task_revoked` is sent here."""
    made = Told()
    signals.task_revoked.connect(made)
    yield made
    signals.task_revoked.disconnect(made)


def dead(post: Post) -> list[tuple[str, str]]:
    """The dead set: task ids and reasons."""
    return [(entry.task_id, entry.reason) for entry in post.sql("SELECT task_id, reason FROM dead ORDER BY id")]


WAYS: dict[str, Callable[[Celery, str], Any]] = {
    "control": lambda app, task_id: app.control.revoke(task_id),
    "list": lambda app, task_id: app.control.revoke(["nobody", task_id, task_id]),
    "terminate": lambda app, task_id: app.control.terminate(task_id),
    "result": lambda app, task_id: app.AsyncResult(task_id).revoke(),
    "results": lambda app, task_id: app.ResultSet([app.AsyncResult(task_id)]).revoke(),
    "command": lambda app, task_id: app.control.broadcast(
        "revoke", arguments={"task_id": [task_id]}, reply=True, timeout=0.1
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_that_waits_is_dead_whatever_revoked_it_and_told_of_once(post: Post, told: Told, way: str) -> None:
    post.send("one")
    post.send("other")

    WAYS[way](post.app, "one")

    assert (post.row("one").doom, post.row("other").doom) == ("revoked", None)
    assert post.begin("one", post.worker()) is None
    post.sidejob.poll()
    post.sidejob.poll()
    assert dead(post) == [("one", "revoked")]
    assert told.ids == ["one"]
    assert post.row("other").doom is None


@pytest.mark.parametrize("wanted", [True, False], ids=["-E", "without"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not-yet"])
def test_monitors_are_told_where_the_worker_tells_them_of_tasks(post: Post, wanted: bool, connected: bool) -> None:
    """The sweeper begins with the worker, before its first connection; its dispatcher tells of the worker always."""
    consumer = SimpleNamespace(
        app=post.app, connection_for_write=post.app.connection_for_write, hostname="ours@here", hub=None,
        amqheartbeat=0, blueprint=SimpleNamespace(start=None), on_connection_error_after_connected=None,
        pool=None, on_task_request=None, on_unknown_task=None, on_invalid_task=None, on_decode_error=None,
        create_task_handler=None, controller=SimpleNamespace(_process_task=None),
    )  # fmt: skip
    celery_s_own = EventsStep(consumer, task_events=wanted)  # as Celery makes the steps, before it connects
    DisconnectionStep(consumer, task_events=wanted)
    if connected:
        celery_s_own.start(consumer)
    post.send("one")
    post.app.control.revoke("one")

    with Events(post.app.conf.broker_url) as events:
        post.sidejob.poll()
        with post.app.events.default_dispatcher() as dispatcher:
            dispatcher.send("task-last", uuid="last")
        wait_until(lambda: events.types("last"), message="what was sent after it")
        assert events.types("one") == (["task-revoked"] if wanted else [])
    assert dead(post) == [("one", "revoked")]
    celery_s_own.shutdown(consumer)


def test_what_waits_for_its_time_in_the_store_is_dead_at_once(post: Post, told: Told) -> None:
    post.send("one", countdown=86400)

    post.app.control.revoke("one")

    post.sidejob.poll()
    assert (dead(post), told.ids, post.sent()) == ([("one", "revoked")], ["one"], [])


def test_what_runs_goes_on_and_does_not_begin_again(post: Post) -> None:
    worker = post.worker()
    for task_id in ("ends", "retried", "lost", "put back"):
        post.send(task_id)
    runs = {task_id: post.begin(task_id, worker) for task_id in ("ends", "retried", "lost", "put back")}
    assert all(runs.values())

    post.app.control.revoke(list(runs))

    post.poll()
    assert dead(post) == []  # each is its run's
    durable_ends.end(post.runtime, runs["ends"])
    durable_runs.put_back(post.runtime, runs["put back"])
    message = Message("retried", "post.letter", "post", "{}", b"[]", eta=None)
    durable_ends.go_on(post.runtime, runs["retried"], message)
    durable_runs.give_back(post.runtime, ["lost"], worker_id=worker, loss=Loss())
    assert [post.begin(task_id, worker, generation=number) for task_id, number in
            (("put back", 1), ("retried", 2), ("lost", 1))] == [None, None, None]  # fmt: skip
    assert {row.task_id: (row.doom, row.due) for row in post.sql(
        "SELECT task_id, doom, next_check_at <= now() AND published_at IS NULL AS due FROM messages"
    )} == {"retried": ("revoked", True), "lost": ("revoked", True), "put back": ("revoked", True)}  # fmt: skip


def test_a_task_of_a_job_and_a_finished_one_are_passed_over(post: Post) -> None:
    @post.sidejob.task(name="post.job")
    def body(job: Any) -> None:
        pass

    job = body.enqueue()

    post.app.control.revoke([job.task_id, "never heard of"])

    assert job.refresh().status == "queued"
    assert post.sql("SELECT doom FROM messages") == [(None,)]


@pytest.mark.parametrize("only", [{"destination": ["celery@somewhere"]}, {"pattern": "some*", "matcher": "glob"}])
def test_a_revocation_for_some_workers_is_not_kept(post: Post, only: dict[str, Any]) -> None:
    post.send("one")

    post.app.control.revoke("one", **only)

    assert post.row("one").doom is None


def test_a_project_s_own_control_stays(database_url: str, redis_url: str) -> None:
    app = Celery("own", broker=redis_url, control=OwnControl, set_as_current=False)
    app.conf.update(sidejob_database_url=database_url, sidejob_durable_tasks=["own.*"])
    SideJob(app)
    app.send_task("own.task", task_id="one")

    app.control.revoke("one")
    app.control.shutdown()

    assert isinstance(app.control, OwnControl)
    assert (app.control.pager(), app.control.told) == ("beep", ["revoke", "shutdown"])
    app.sidejob.poll()
    assert [entry.task_id for entry in app.sidejob.dead] == ["one"]
    copy = pickle.loads(pickle.dumps(app.control_cls))(app=app)  # as a process that is spawned is sent it
    assert isinstance(copy, OwnControl)
    app.sidejob.close()
    app.close()


def test_a_control_that_was_used_before_keeps_too(database_url: str, redis_url: str) -> None:
    app = Celery("early", broker=redis_url, set_as_current=False)
    app.conf.update(sidejob_database_url=database_url, sidejob_durable_tasks=["own.*"])
    control = app.control
    SideJob(app)
    app.send_task("own.task", task_id="one")

    control.revoke("one")

    app.sidejob.poll()
    assert [(entry.task_id, entry.reason) for entry in app.sidejob.dead] == [("one", "revoked")]
    app.sidejob.close()
    app.close()


def heard(redis_url: str, act: Callable[[], Any]) -> int:
    """How many broadcasts are sent meanwhile, as a worker would hear them.

    Redis has no databases for what is published: kombu puts the number before the channel's name, and other tests
    have other numbers.
    """
    number = urlsplit(redis_url).path.strip("/")
    with redis.Redis.from_url(redis_url) as client, client.pubsub() as ear:
        ear.psubscribe(f"/{number}.celery.pidbox*")
        assert ear.get_message(timeout=5)
        try:
            act()
        finally:
            count = 0
            while ear.get_message(timeout=0.5):
                count += 1
    return count


@pytest.mark.parametrize("on_store_down", ["error", "publish"])
def test_without_a_store_the_workers_are_told_and_the_caller_learns_it(
    redis_url: str, caplog: pytest.LogCaptureFixture, on_store_down: str
) -> None:
    app = make_app(
        "away",
        broker=redis_url,
        sidejob_database_url="postgresql://127.0.0.1:1/none",
        sidejob_on_store_down=on_store_down,
    )
    refused: list[StoreUnavailableError] = []

    def revoke() -> None:
        try:
            app.control.revoke("one")
        except StoreUnavailableError as error:
            refused.append(error)

    assert heard(redis_url, revoke) == 1

    said = [str(error) for error in refused] if on_store_down == "error" else caplog.messages
    assert any(text.startswith("The revocation was not kept") for text in said)
    assert bool(refused) == (on_store_down == "error")
    app.sidejob.close()
    app.close()


def test_an_app_without_a_store_revokes_as_before(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app("plain", broker=redis_url)

    with caplog.at_level(logging.WARNING, "celery_sidejob"):
        assert heard(redis_url, lambda: app.control.revoke("one")) == 1

    assert caplog.messages == []
    app.close()


def test_a_group_is_revoked_in_one_statement(post: Post) -> None:
    letter = post.app.signature("post.letter")
    results = group(letter.clone(args=(number,)) for number in range(3)).apply_async(queue="post")

    results.revoke()

    post.sidejob.poll()
    assert {task_id for task_id, _ in dead(post)} == {result.id for result in results}


@pytest.mark.slow
def test_what_is_kept_holds_although_the_broker_is_away(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    post.send("waits")
    post.send("other")
    client = make_app("post", broker="redis://127.0.0.1:1/0", sidejob_database_url=post.app.conf.sidejob_database_url)
    sidejob = client.sidejob
    try:
        client.AsyncResult("waits").revoke()
        assert "The revocation is kept: waiting tasks do not run, although the workers could not be told" in caplog.text
        assert post.row("waits").doom == "revoked"

        with pytest.raises(OperationalError, match=r"is kept, but .* what runs is not terminated"):
            client.control.revoke("other", terminate=True)
        assert post.row("other").doom == "revoked"
        with pytest.raises(OperationalError, match="Connection refused"):
            client.control.revoke("nobody's")
    finally:
        sidejob.close()

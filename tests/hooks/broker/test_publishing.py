"""The connection that this process publishes on is its own, and ours to close."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection, Exchange, Queue

from celery_sidejob import embedded
from celery_sidejob.hooks.broker import publishing
from celery_sidejob.hooks.broker.connection import BrokerConnection
from celery_sidejob.hooks.broker.publishing import CeleryPublisher
from celery_sidejob.hooks.broker.view import CeleryBroker
from celery_sidejob.model.durable import Message
from celery_sidejob.model.messages import Doorbell
from celery_sidejob.store.connection.connections import Connections
from tests.tools.freezing import frozen
from tests.tools.waiting import wait_until


@pytest.fixture
def watcher(own_valkey: embedded.Valkey) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_valkey.url) as client:
        yield client


def test_it_serves_all_messages_and_is_closed_when_it_is_let_go(
    own_valkey: embedded.Valkey, watcher: redis.Redis
) -> None:
    app = Celery("shop", broker=own_valkey.url, set_as_current=False)
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    nobody = len(watcher.client_list())
    bells = [Doorbell(number, 1, f"task-{number}", "noop", "celery") for number in range(5)]

    assert publisher.publish(bells[:1]) == bells[:1]
    opened = len(watcher.client_list())
    assert opened > nobody
    assert publisher.publish(bells[1:]) == bells[1:]
    assert watcher.llen("celery") == len(bells)
    assert len(watcher.client_list()) == opened

    publisher.close()
    wait_until(lambda: len(watcher.client_list()) == nobody, message="the connection to be closed")
    app.close()


def test_a_broker_that_is_away_is_said_to_be_so_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    bell = Doorbell(1, 1, "task-1", "noop", "celery")

    def tries(count: int) -> int:
        for _ in range(count):
            publisher._connection._paused_until = float("-inf")  # the pause is over
            assert publisher.publish([bell]) == []
            assert not publisher._connection.ready
        return sum(record.levelname == "WARNING" for record in caplog.records)

    assert tries(5) == 1
    monkeypatch.setattr("celery_sidejob.hooks.broker.connection.WARN_S", 0.0)
    assert tries(2) == 3
    app.close()


def test_a_broker_url_that_cannot_be_read_is_told_of_without_its_password(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("shop", broker="redis://:se/cret@127.0.0.1:6379/0", set_as_current=False)
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)

    assert publisher.publish([Doorbell(1, 1, "task-1", "noop", "celery")]) == []

    assert "broker_url (or broker_read_url, broker_write_url) cannot be read" in caplog.text
    assert "cret" not in caplog.text
    app.close()


def message(number: int, queue: str = "celery", exchange: str = "") -> Message:
    """A message of an ordinary task."""
    about = {
        "content_type": "application/json", "content_encoding": "utf-8", "headers": {"id": f"task-{number}"},
        "properties": {}, "exchange": exchange, "routing_key": queue, "delivery_mode": 2, "declare": [],
    }  # fmt: skip
    return Message(f"task-{number}", "noop", queue, "{}", b"[[], {}, {}]", about=about)


@pytest.fixture
def publisher(own_valkey: embedded.Valkey) -> Iterator[CeleryPublisher]:
    app = Celery("shop", broker=own_valkey.url, set_as_current=False)
    made = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    yield made
    made.close()
    app.close()


def test_what_redis_refuses_is_not_published_and_its_queue_is_passed_over(
    publisher: CeleryPublisher, watcher: redis.Redis
) -> None:
    watcher.set("odd", "no list")
    one, other, last = message(0, "odd"), message(1), message(2, "odd")

    assert publisher.publish([one]) == []
    assert publisher.publish([other]) == [other]
    watcher.delete("odd")
    assert publisher.publish([last, other]) == [other], "not at once"
    assert (watcher.llen("celery"), watcher.llen("odd")) == (2, 0)


def test_after_redis_has_hung_up_the_next_message_goes_over_another_connection(
    publisher: CeleryPublisher, watcher: redis.Redis
) -> None:
    assert publisher.publish([message(0)]) == [message(0)]
    watcher.client_kill_filter(skipme=True, _type="normal")

    assert publisher.publish([message(1)]) == [message(1)]
    assert watcher.llen("celery") == 2


def test_a_redis_that_does_not_answer_begins_a_pause_after_a_second(
    publisher: CeleryPublisher, own_valkey: embedded.Valkey
) -> None:
    assert publisher.publish([message(0)]) == [message(0)]
    with frozen(own_valkey.pid):
        began = time.monotonic()
        assert publisher.publish([message(1)]) == []
        assert not publisher._connection.ready
        assert publisher.publish([message(2)]) == []
        assert time.monotonic() - began < 1.9


def test_many_are_sent_in_order(
    publisher: CeleryPublisher, watcher: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "TOGETHER", 3)
    many = [message(number) for number in range(8)]

    assert publisher.publish(many) == many

    ids = [json.loads(text)["headers"]["id"] for text in reversed(watcher.lrange("celery", 0, -1))]
    assert ids == [one.task_id for one in many]


def test_a_page_with_a_message_for_an_exchange_goes_where_that_leads(
    publisher: CeleryPublisher, watcher: redis.Redis
) -> None:
    with Connection(publisher._app.conf.broker_url) as connection:
        fans = Exchange("fans", type="direct")
        for name in ("left", "right"):
            Queue(name, fans, routing_key="celery", channel=connection.default_channel).declare()
    many = [message(0), message(1, exchange="fans"), message(2)]

    assert publisher.publish(many) == many

    assert [watcher.llen(name) for name in ("celery", "left", "right")] == [2, 1, 1]


def test_a_broker_that_is_away_is_waited_for_once(own_valkey: embedded.Valkey, publisher: CeleryPublisher) -> None:
    with frozen(own_valkey.pid):
        began = time.monotonic()
        assert publisher.publish([message(0)]) == []
        assert publisher.publish([message(0)]) == []
        assert time.monotonic() - began < 1.9


@pytest.mark.parametrize(
    "begin",
    [
        lambda publisher: publisher.publish([message(1)]),
        lambda publisher: publisher.publish([message(1), message(2)]),
        lambda publisher: publisher.publish([Doorbell(1, 1, "task-1", "noop", "celery")]),
        lambda publisher: CeleryBroker(
            publisher._app, publisher._connection, Connections(None, "sidejob")
        ).was_emptied(),
        lambda publisher: publisher.announce(lambda producer: producer.publish({}, routing_key="celery")),
    ],
    ids=["one", "many", "doorbell", "marker", "event"],
)
def test_a_time_limit_that_strikes_in_here_is_for_the_caller(
    begin: Callable[[CeleryPublisher], object], publisher: CeleryPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes the connection with it: half a command may be written, or an answer be on its way."""
    assert publisher.publish([message(0)]) == [message(0)]

    def strike(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as limited:
        limited.setattr(redis.Connection, "send_packed_command", strike)
        limited.setattr(redis.Connection, "send_command", strike)
        with pytest.raises(SoftTimeLimitExceeded):
            begin(publisher)

    assert publisher._connection.ready, "the broker is there"
    assert publisher.publish([message(3)]) == [message(3)]


def test_a_time_limit_that_strikes_before_the_answer_is_for_the_caller(
    publisher: CeleryPublisher, watcher: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher.publish([message(0)]) == [message(0)]

    def strike(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as limited:
        limited.setattr(redis.Connection, "read_response", strike)
        with pytest.raises(SoftTimeLimitExceeded):
            publisher.publish([message(1)])

    assert publisher.publish([message(2)]) == [message(2)]
    assert watcher.llen("celery") == 3


def test_a_time_limit_while_connecting_leaves_no_connection_to_another_database(
    own_valkey: embedded.Valkey, watcher: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = urlsplit(own_valkey.url)._replace(path="/3").geturl()
    app = Celery("shop", broker=url, set_as_current=False)
    publisher = CeleryPublisher(app, BrokerConnection(app), lambda jobs: None)
    send = redis.Connection.send_command
    try:
        assert publisher.publish([message(0)]) == [message(0)]
        watcher.client_kill_filter(skipme=True, _type="normal")

        def send_until_it_strikes(connection: Any, *command: Any, **options: Any) -> None:
            if command[0] == "SELECT":
                raise SoftTimeLimitExceeded
            send(connection, *command, **options)

        with monkeypatch.context() as limited:
            limited.setattr(redis.Connection, "send_command", send_until_it_strikes)
            with pytest.raises(SoftTimeLimitExceeded):
                publisher.publish([message(1)])
        assert publisher.publish([message(1)]) == [message(1)]

        assert watcher.llen("celery") == 0, "in database 0"
        with redis.Redis.from_url(url) as meant:
            assert meant.llen("celery") == 2
    finally:
        publisher.close()
        app.close()

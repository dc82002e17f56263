"""The connection that this process publishes on is its own, and ours to close."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis
from celery import Celery

from celery_sidejob import embedded
from celery_sidejob.hooks.publishing import CeleryPublisher
from celery_sidejob.model.durable import Message
from celery_sidejob.model.messages import Doorbell
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
    publisher = CeleryPublisher(app, "sidejob", lambda jobs: None, lease_s=20)
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


def message(number: int, queue: str = "celery") -> Message:
    """A message of an ordinary task."""
    about = {
        "content_type": "application/json", "content_encoding": "utf-8", "headers": {"id": f"task-{number}"},
        "properties": {}, "exchange": "", "routing_key": queue, "delivery_mode": 2, "declare": [],
    }  # fmt: skip
    return Message(f"task-{number}", "noop", queue, "{}", b"[[], {}, {}]", about=about)


KEYS = [(f"task-{number}", 1) for number in range(4)]


@pytest.fixture
def publisher(own_valkey: embedded.Valkey) -> Iterator[CeleryPublisher]:
    app = Celery("shop", broker=own_valkey.url, set_as_current=False)
    made = CeleryPublisher(app, "sidejob", lambda jobs: None, lease_s=20)
    yield made
    made.close()
    app.close()


def test_what_redis_refuses_is_not_confirmed_and_its_queue_is_passed_over(
    publisher: CeleryPublisher, watcher: redis.Redis
) -> None:
    watcher.set("odd", "no list")
    one, other, last = message(0, "odd"), message(1), message(2, "odd")

    assert publisher.publish([one]) == [one], "nobody has waited for the answer"
    assert publisher.publish([other]) == [other]
    assert publisher.confirm(KEYS[:2]) == KEYS[1:2]
    assert publisher.confirm(KEYS[:2]) == KEYS[1:2], "it is remembered until its mark is not written"
    assert publisher.publish([last]) == []
    assert watcher.llen("celery") == 1


def test_after_redis_has_hung_up_the_next_message_goes_over_another_connection(
    publisher: CeleryPublisher, watcher: redis.Redis
) -> None:
    assert publisher.publish([message(0)]) == [message(0)]
    assert publisher.confirm(KEYS[:1]) == KEYS[:1]
    watcher.client_kill_filter(skipme=True, _type="normal")

    assert publisher.publish([message(1)]) == [message(1)]
    assert publisher.confirm(KEYS[:2]) == KEYS[:2]
    assert watcher.llen("celery") == 2


def test_a_redis_that_does_not_answer_begins_a_pause_after_a_second(
    publisher: CeleryPublisher, own_valkey: embedded.Valkey, watcher: redis.Redis
) -> None:
    assert publisher.publish([message(0)]) == [message(0)]
    assert publisher.confirm(KEYS[:1]) == KEYS[:1]
    with frozen(own_valkey.pid):
        assert publisher.publish([message(1)]) == [message(1)], "the system has taken it"
        assert publisher.publish([message(2)]) == []
        assert not publisher.ready
        assert publisher.publish([message(3)]) == []

    assert publisher.confirm(KEYS) == [KEYS[0], KEYS[2], KEYS[3]], "it tells only of what it was given"


def test_what_is_not_kept_is_not_sent(publisher: CeleryPublisher, watcher: redis.Redis) -> None:
    asked: list[bool] = []

    def kept(answer: bool) -> Callable[[], bool]:
        return lambda: asked.append(answer) or answer  # type: ignore[func-returns-value]

    assert publisher.publish([message(0)], is_kept=kept(False)) == []
    assert publisher.publish([message(1)], is_kept=kept(True)) == [message(1)]
    assert publisher.publish([message(2)]) == [message(2)]
    assert publisher.confirm(KEYS[1:3]) == KEYS[1:3]
    assert (watcher.llen("celery"), set(asked)) == (2, {False, True})

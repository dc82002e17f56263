"""The connection that this process publishes on is its own, and ours to close."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery

from celery_sidejob import embedded
from celery_sidejob.hooks.publishing import CeleryPublisher
from celery_sidejob.model.messages import Doorbell
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


def test_a_broker_that_is_away_is_said_to_be_so_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    publisher = CeleryPublisher(app, "sidejob", lambda jobs: None, lease_s=20)
    bell = Doorbell(1, 1, "task-1", "noop", "celery")

    def tries(count: int) -> int:
        for _ in range(count):
            publisher._paused_until = float("-inf")  # the pause is over
            assert publisher.publish([bell]) == []
            assert not publisher.ready
        return sum(record.levelname == "WARNING" for record in caplog.records)

    assert tries(5) == 1
    monkeypatch.setattr("celery_sidejob.hooks.publishing.WARN_S", 0.0)
    assert tries(2) == 3
    app.close()

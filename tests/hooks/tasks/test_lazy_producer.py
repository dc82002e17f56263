"""A durable call takes no producer from Celery's pool, and what needs one still has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import kombu
import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from tests.tools.apps import make_app
from tests.tools.producers import all_producers

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def app(database_url: str, redis_url: str) -> Iterator[Celery]:
    made = make_app(
        "shop",
        broker=redis_url,
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["shop.*"],
    )
    yield made
    made.sidejob.close()
    made.close()


def test_a_call_needs_nothing_of_the_pool(app: Celery, redis_url: str) -> None:
    with all_producers(app):
        app.send_task("shop.mail", task_id="one")

    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("celery") == 1


def test_the_event_that_it_was_sent_goes_over_one_of_the_pool_which_comes_back(app: Celery) -> None:
    app.conf.task_send_sent_event = True
    heard: list[str] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"task-sent": lambda event: heard.append(event["uuid"])})
        with receiver.consumer_context() as (listening, _, _), redis.Redis.from_url(app.conf.broker_url) as client:
            while not client.pubsub_numpat():
                with suppress(TimeoutError):
                    listening.drain_events(timeout=0.1)
            for task_id in ("one", "two"):
                app.send_task("shop.mail", task_id=task_id)
            while len(heard) < 2:
                listening.drain_events(timeout=10)
    assert heard == ["one", "two"]
    with all_producers(app):
        pass


def without_a_store(broker_url: str) -> Celery:
    made = make_app(
        "shop",
        broker=broker_url,
        sidejob_database_url="postgresql://127.0.0.1:1/none",
        sidejob_durable_tasks=["shop.*"],
        sidejob_on_store_down="publish",
        task_publish_retry=False,
    )
    return made


def test_without_store_and_broker_the_error_is_celery_s_own() -> None:
    app = without_a_store(NOWHERE)
    with pytest.raises(OperationalError):
        app.send_task("shop.mail")
    app.close()


def test_a_producer_or_a_connection_that_is_given_is_used(redis_url: str) -> None:
    app = without_a_store(redis_url)
    given: list[Any] = []

    class Given(kombu.Producer):
        def publish(self, *args: Any, **options: Any) -> Any:
            given.append(options["headers"]["id"])
            return super().publish(*args, **options)

    with kombu.Connection(redis_url) as connection:
        app.send_task("shop.mail", task_id="one", producer=Given(connection))
        app.send_task("shop.mail", None, None, None, None, "two", Given(connection))
        app.send_task("shop.mail", task_id="three", connection=connection)
        with redis.Redis.from_url(redis_url) as client:
            assert client.llen("celery") == 3
    assert given == ["one", "two"]
    app.close()

"""What the rest of this package does to a Redis channel does no harm to ours, and sees what it holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery import Celery
from kombu import Connection

from celery_sidejob.hooks import configuration
from celery_sidejob.hooks.patches.connections import keep_client
from tests.tools.apps import make_app
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming


@pytest.fixture(params=["", "shop:"], ids=["plain", "prefixed"])
def app(database_url: str, broker_url: str, request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app with a store, and this broker, to which nobody listens."""
    made = make_app(
        "shop",
        broker=broker_url,
        sidejob_database_url=database_url,
        sidejob_durable_tasks=["shop.*"],
        broker_transport_options={"global_keyprefix": request.param},
    )
    yield made
    made.sidejob.close()
    made.close()


def test_it_is_a_redis_broker_and_the_same_as_by_its_other_url(app: Celery, redis_url: str) -> None:
    assert configuration.broker_family(app) == "redis"
    by_its_own = configuration.broker_identity(app)
    app.conf.broker_url = redis_url
    assert configuration.broker_identity(app) == by_its_own


def test_messages_are_pushed_with_a_bell_and_found_wherever_they_are(app: Celery, server: redis.Redis) -> None:
    prefix = app.conf.broker_transport_options["global_keyprefix"]
    for name in ("fetched", "waiting"):
        app.send_task("shop.mail", (name,), task_id=name)
    runtime = app.sidejob.runtime
    assert server.llen(f"{prefix}celery") == 2
    assert server.llen(f"{prefix}_sidejob.bell.celery") == 1
    with app.connection_for_read() as connection:
        assert connection.default_channel.basic_get("celery").headers["id"] == "fetched"
        assert runtime.broker.ready_messages("celery") == 1


def test_a_kept_client_on_our_channel(connect: Connect, server: redis.Redis) -> None:
    connection: Connection = connect()
    channel = connection.default_channel
    keep_client(channel)
    server.script_flush()
    with connection.Producer() as producer:
        producer.publish(1, routing_key="queue")
    consuming = Consuming(connection, "queue", prefetch=1)
    assert consuming.take(1) == [1]
    consuming.messages[0].ack()
    assert not list(server.scan_iter("_sidejob.held.*"))

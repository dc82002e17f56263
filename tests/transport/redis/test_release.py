"""The way back to kombu's own transport, and what workers of a plain app need for it: no store."""

from __future__ import annotations

import redis
from celery import Celery

from tests.tools.commands import Said, ask
from tests.tools.waiting import wait_until
from tests.transport.conftest import Connect
from tests.transport.consuming import Consuming, publish


def released(url: str, *words: str) -> Said:
    """Give the command to a plain app with this broker."""
    app = Celery("plain", broker=url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": "shop:"}
    try:
        return ask(app, "transport", "release", *words)
    finally:
        app.close()


def test_all_goes_back_to_the_lists(connect: Connect, redis_url: str, server: redis.Redis) -> None:
    options = {"global_keyprefix": "shop:", "consumer_timeout": 0.5}
    publish(connect(**options), "queue", *range(4))
    publish(connect(**options), "queue", *range(4, 6), priority=9)
    killed = Consuming(connect(**options), "queue", prefetch=5)
    killed.take(5)
    said = released(redis_url)
    assert said.code == 1
    assert said.lines[0] == "Messages given back: 0. Workers that held them: 0."
    assert "1 is alive" in said.lines[1]

    killed.fall_silent()
    wait_until(lambda: released(redis_url).code == 0, message="it to be dead")
    stock = Consuming(connect(redis_url, global_keyprefix="shop:"), "queue")
    assert stock.take(6) == list(range(6))
    assert not list(server.scan_iter("shop:_sidejob.held.*"))
    assert not server.exists("shop:_sidejob.consumers")


def test_live_workers_lose_what_they_hold_only_by_force(connect: Connect, broker_url: str) -> None:
    options = {"global_keyprefix": "shop:"}
    publish(connect(**options), "queue", 0)
    alive = Consuming(connect(**options), "queue", prefetch=1)
    alive.take(1)
    said = released(broker_url, "--force", "--json")
    assert (said.code, said.document) == (0, {"consumers": 1, "messages": 1, "alive": [], "dead": 0})

"""`Celery._connection` makes each of an app's connections to its broker."""

from __future__ import annotations

import inspect
from typing import Any

from celery import Celery

from celery_sidejob.hooks.patches import app_methods


def test_every_connection_is_made_by_the_url_that_was_found(app: Celery) -> None:
    assert list(inspect.signature(Celery._connection).parameters)[:2] == ["self", "url"]
    app.conf.update(
        broker_read_url="memory://read",
        broker_write_url="memory://write",
        broker_transport_options={"kept": 1, "own": 1},
    )
    asked: list[Any] = []

    def resolve(of: Celery, url: Any) -> Any:
        assert of is app
        asked.append(url)
        return "memory://found", {"own": 2, "given": 2}

    app_methods.resolve_urls(app, resolve)

    with app.pool.acquire() as pooled, app.producer_pool.acquire() as producer:
        connections = [app.connection(), app.connection_for_read(), app.connection_for_write(), pooled]
        connections += [producer.connection, app.connection(transport_options={"given": 3})]
        options = [connection.transport_options for connection in connections]
        assert {connection.hostname for connection in connections} == {"found"}
    assert set(asked) == {"memory://read", "memory://write"}
    assert options == [{"kept": 1, "own": 2, "given": 2}] * 5 + [{"kept": 1, "own": 2, "given": 3}]

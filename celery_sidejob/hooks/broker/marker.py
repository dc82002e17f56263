"""A store's marker in the broker, by which it is noticed that the broker has lost what it had."""

from __future__ import annotations

from typing import Any

from .rabbitmq import MarkerExchange


class Markers:
    """The markers of all stores with one schema: a key in Redis, an exchange in RabbitMQ, elsewhere nothing."""

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._exchanges: dict[str | None, MarkerExchange] = {}

    def is_there(self, channel: Any, family: str, store: str | None) -> bool:
        """Tell whether a store's is, and put it there where it is not; True where there can be none."""
        marked = self._schema if store is None else f"{self._schema}:{store}"
        if family == "redis":
            return bool(channel.client.set(f"celery_sidejob:marker:{marked}", "1", get=True, keepttl=False))
        if family == "amqp":
            if store not in self._exchanges:
                self._exchanges[store] = MarkerExchange(marked)
            return self._exchanges[store].is_there(channel.connection)
        return True

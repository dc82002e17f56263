"""A store's marker in the broker, by which it is noticed that the broker has lost what it had."""

from __future__ import annotations

import logging
from typing import Any

from amqp.exceptions import AccessRefused

from . import rabbitmq

logger = logging.getLogger("celery_sidejob")


class Markers:
    """The markers of all stores with one schema: a key in Redis, an exchange in RabbitMQ, elsewhere nothing.

    Nobody uses the exchange. It is durable, so it is gone only if the virtual host was reset.
    """

    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._forbidden: set[str] = set()

    def is_there(self, channel: Any, family: str, store: str | None) -> bool:
        """Tell whether a store's is, and put it there where it is not; True where there can be none."""
        marked = self._schema if store is None else f"{self._schema}:{store}"
        if family == "redis":
            return bool(channel.client.set(f"celery_sidejob:marker:{marked}", "1", get=True, keepttl=False))
        if family == "amqp" and marked not in self._forbidden:
            try:
                return rabbitmq.has_exchange(channel.connection, f"celery_sidejob.marker.{marked}")
            except AccessRefused as error:
                self._forbidden.add(marked)
                logger.warning("A reset of RabbitMQ's virtual host is noticed only after sidejob_lost_after: %s", error)
        return True

"""kombu's message as the columns of a row, and the message that is delivered from a row.

A row is put into its queue by itself, or with those of a batch.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kombu.exceptions import BatchPublishError
from kombu.utils.json import JSONEncoder, loads

from ...store.broker import messages
from ...store.broker.messages import HIGHEST_PRIORITY, Row
from ...store.statement import Transaction
from ..quarantine import eta_of
from .link import Link, ring_of_queue

ENCODED = "base64"
BESIDE = ("content-type", "content-encoding")
"""What kombu has beside a message's properties, and a row among them."""

as_json: Callable[[Any], str] = JSONEncoder().encode
"""Return a text like kombu's `dumps`, which makes an encoder for each."""


def encoded(body: Any) -> tuple[str, str | None]:
    """Return a body as a text of Postgres, and how it was encoded: not at all, if it is such a text."""
    if isinstance(body, str) and "\0" not in body:
        return body, None
    data = body.encode() if isinstance(body, str) else bytes(body)
    return base64.b64encode(data).decode(), ENCODED


def row_of(queue: str, message: Mapping[str, Any]) -> Row:
    """Return the row of a message for a queue."""
    properties, headers = message["properties"], message["headers"]
    return Row(
        queue,
        priority_of(properties),
        due_at_of(headers),
        as_json(headers),
        stored(message, properties),
        message["body"],
    )


def stored(message: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    """Return the properties of a message as they are stored."""
    kept = {**properties, **{name: message.get(name) for name in BESIDE}}
    kept.pop("delivery_tag", None)
    return as_json(kept)


def payload_of(row: Any, delivery_tag: Any) -> dict[str, Any]:
    """Return kombu's message from the columns headers, properties and body of a row."""
    properties = loads(row.properties)
    beside = {name: properties.pop(name, None) for name in BESIDE}
    properties["delivery_tag"] = delivery_tag
    return {**beside, "headers": dict(loads(row.headers)), "properties": properties, "body": row.body}


def returned(payload: dict[str, Any], returns: int) -> dict[str, Any]:
    """Note in a message how often it was delivered before."""
    if returns:
        payload["headers"]["redelivered"] = True
        properties = payload["properties"]
        about = properties.get("delivery_info") or {}
        if isinstance(about, Mapping):  # else it is no message, as is found when kombu is to make one of it
            properties["delivery_info"] = {**about, "redelivered": True}
        properties["delivery_count"] = returns
    return payload


def due_at_of(headers: Mapping[str, Any]) -> datetime | None:
    """Return until when a task's message waits in Postgres; None if it may be delivered now.

    A time without a zone is the app's business, and left to the worker.
    """
    eta = eta_of(headers)
    return eta if eta is not None and eta.tzinfo is not None and eta > datetime.now(UTC) else None


def priority_of(properties: Mapping[str, Any]) -> int:
    """Return a message's priority, from 0 to 9; without one it is 0, the lowest."""
    try:
        return max(0, min(HIGHEST_PRIORITY, int(properties["priority"])))
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0


# -- putting rows into queues ------------------------------------------------------------------------------------------


def put(link: Link, row: Row) -> None:
    """Send a message to one queue."""
    link.run("put", lambda executor: messages.put(executor, row))
    # If we die here, consumers find the message at their next look.
    link.ring_apart(ring_of_queue(row.queue))


@dataclass(slots=True)
class Lent:
    """A transaction of a caller's, into which batches are written that are begun while it is in `LENT`."""

    transaction: Transaction
    queues: dict[str, None] = field(default_factory=dict)
    """Where messages were put, in order: to be rung for after its commit."""


LENT: ContextVar[Lent | None] = ContextVar("celery_sidejob_lent", default=None)


class PublishBatch:
    """A batch of one producer. After a flush has failed it takes nothing any more."""

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._rows: list[Row] = []
        self._failed: BaseException | None = None
        self._closed = False
        self._lent = LENT.get()

    def publish(self, message: Any, **options: Any) -> Any:
        """Route one message; sends what has gathered if that is enough."""
        self._check_usable()
        result = self.channel.basic_publish(message, _publish_batch=self, **options)
        if len(self._rows) >= self._max_size:
            self.flush()
        return result

    def add(self, row: Row) -> None:
        """Add a message for one queue."""
        self._rows.append(row)

    def flush(self) -> None:
        """Send all that has gathered."""
        self._check_usable()
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._lent is not None:
            for row in rows:
                messages.put(self._lent.transaction, row)
                self._lent.queues[row.queue] = None
            return
        link = self.channel.link
        try:
            link.run("copy", lambda executor: messages.put_all(executor, rows))
        except BaseException as error:
            self._failed = error
            if not isinstance(error, Exception):
                raise
            raise BatchPublishError(
                "a batch was not sent, or its answer was lost: it was sent as a whole then"
            ) from error
        for queue in dict.fromkeys(row.queue for row in rows):
            link.ring_apart(ring_of_queue(queue))

    def discard(self) -> None:
        """Forget what was not sent yet."""
        self._rows = []
        self._closed = True

    close = discard

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise BatchPublishError("this batch has failed before") from self._failed
        if self._closed:
            raise RuntimeError("this batch is closed")

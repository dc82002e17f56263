"""kombu's message as the columns of a row, and the message that is delivered from a row."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kombu.utils.json import JSONEncoder, loads

from ...store.broker.messages import HIGHEST_PRIORITY, Row

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
    try:
        eta = datetime.fromisoformat(headers["eta"])
    except (KeyError, TypeError, ValueError):
        return None
    return eta if eta.tzinfo is not None and eta > datetime.now(UTC) else None


def priority_of(properties: Mapping[str, Any]) -> int:
    """Return a message's priority, from 0 to 9; without one it is 0, the lowest."""
    try:
        return max(0, min(HIGHEST_PRIORITY, int(properties["priority"])))
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0

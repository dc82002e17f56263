"""The message of a durable task in its stored form: the body's bytes, and everything around the body as text.

`hooks/tasks/composing.py` makes it, and `operations/ledger/keeping.py` keeps it. It is read here to be published, to be
run, and to be searched in the broker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.canvas import maybe_signature
from celery.utils.time import maybe_iso8601
from kombu.compression import decompress
from kombu.serialization import dumps, loads, prepare_accept_content, registry
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads

from ...model.durable import CALL, DEATHS, HEADER, KEPT_FORMAT, REPUBLISHED, Content, Message, digest_of, header_of
from ...model.errors import InvalidValueError
from ...model.logger import logger
from ...transport.decoding import check_task
from .carried import NewerFormatError, as_bytes, check_names

PROPERTIES = frozenset({"correlation_id", "reply_to", "priority", "expiration", "type", "app_id", "message_id"})
"""Properties of a delivery that its publisher sets."""

ABOUT = frozenset(
    {"content_type", "content_encoding", "headers", "properties", "exchange", "routing_key", "delivery_mode", "declare"}
)
"""The keys of everything around a body."""

PROTOCOL_2 = (
    "task", "id", "root_id", "parent_id", "group", "group_index", "shadow", "eta", "expires", "retries", "timelimit",
    "argsrepr", "kwargsrepr", "origin", "ignore_result",
)  # fmt: skip
"""Headers of task protocol 2 that a message of protocol 1 has in its body."""

RESERVED = "continuation:"
"""The prefix of the keys of rows that are not messages of tasks."""


def check_id(task: str, task_id: str) -> None:
    """Raise InvalidValueError for a task id that a broker or the store cannot carry."""
    check_names(task, task_id=task_id)
    if task_id.startswith(RESERVED):
        raise InvalidValueError(f"task_id={task_id!r} begins with {RESERVED!r}, which names rows of another kind.")


def publish(app: Celery, producer: Any, message: Message, *, declared: set[str], timeout: float) -> None:
    """Give a message to the broker with the bytes and headers that were kept; no signal is sent.

    `declared` are the queues that its connection has declared; the queues of this message are added. Raises
    NewerFormatError, and InvalidValueError for an unreadable row.
    """
    about, headers, properties = _around(message)
    producer.publish(
        message.body,
        exchange=about["exchange"],
        routing_key=about["routing_key"],
        content_type=about["content_type"],
        content_encoding=about["content_encoding"],
        delivery_mode=about["delivery_mode"],
        declare=[app.amqp.queues[name] for name in about["declare"] if name not in declared],
        headers=headers,
        retry=False,
        timeout=timeout,
        **properties,
    )
    declared.update(about["declare"])


def delivered(message: Message) -> dict[str, Any]:
    """Return a due message as kombu's virtual transports deliver it; raises the errors of `publish`."""
    about, headers, properties = _around(message)
    return {
        "body": message.body,
        "content-type": about["content_type"],
        "content-encoding": about["content_encoding"],
        "headers": headers,
        "properties": {
            **properties,
            "delivery_mode": about["delivery_mode"],
            "delivery_info": {
                "exchange": "",
                "routing_key": message.queue,
                "priority": properties.get("priority") or 0,
            },
        },
    }


def _around(message: Message) -> tuple[Mapping[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the stored text around a body, and the headers and properties with which the message is sent."""
    about = message.about or _about(message)
    headers = {**about["headers"], HEADER: header_of(message)}
    if about.get("deaths"):
        headers[DEATHS] = about["deaths"]
    properties = dict(about["properties"])
    if message.again:
        headers[REPUBLISHED] = True
        if message.expires_at is None:  # it was taken out of the dead set
            headers["expires"] = None
            properties.pop("expiration", None)
    return about, headers, properties


def own_priority(about: Mapping[str, Any]) -> int | None:
    """Return the priority, 0 to 9, of a message for its own queue; None if an exchange routes it elsewhere."""
    if about["exchange"]:
        return None
    try:
        return max(0, min(9, int(about["properties"].get("priority") or 0)))
    except (TypeError, ValueError, OverflowError):
        return 0


def to_own_queue(message: Message) -> Message | None:
    """Return a message with its `own_priority`, None if an exchange routes it; raises the errors of `publish`."""
    priority = own_priority(message.about or _about(message))
    return None if priority is None else replace(message, priority=priority)


def request_of(app: Celery, message: Message) -> Context:
    """Return the request of a kept message, as far as it is readable here, for result backends."""
    try:
        about = _about(message)
    except InvalidValueError as error:
        logger.warning("%s", error)
        about = {"headers": {"id": message.task_id}, "properties": {}, "content_type": None, "content_encoding": None}
    headers = about["headers"]
    embed: Mapping[str, Any] = {}
    try:
        _, _, embed = decoded(app, message.body, headers, about["content_type"], about["content_encoding"])
    except Exception as error:
        logger.warning("The body of %s cannot be read here: %s", message.task_id, error)
    request = Context({**headers, **embed, "task": message.task, "delivery_info": {"routing_key": message.queue}})
    request.correlation_id = about["properties"].get("correlation_id")
    request.reply_to = about["properties"].get("reply_to")
    if request.chord:
        request.chord = maybe_signature(request.chord, app=app)
    return request


def decoded(
    app: Celery, body: Any, headers: Mapping[str, Any], content_type: Any, content_encoding: Any
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return the arguments in the body of a message with these headers, and the rest of the body."""
    if headers.get("compression"):
        body = decompress(body, headers["compression"])
    accept = prepare_accept_content(app.conf.accept_content)
    args, kwargs, embed = loads(body, content_type, content_encoding, accept=accept)
    return args, kwargs, embed or {}


def received(app: Celery, task: str, message: Any, converted: tuple[Mapping[str, Any], Any] | None = None) -> Message:
    """Return the message of a delivery whose publisher did not have this package, as it would have been kept.

    `converted` is a message of task protocol 1 as Celery has converted it to protocol 2: headers and contents of the
    body.
    """
    about = message.delivery_info
    body, content_type, content_encoding = message.body, message.content_type, message.content_encoding
    if converted is None:
        headers = {key: value for key, value in message.headers.items() if key != "compression"}  # kombu has undone it
    else:
        headers = {"lang": "py", **{key: converted[0][key] for key in PROTOCOL_2 if key in converted[0]}}
        serializer = registry.type_to_name.get(content_type, "json")
        content_type, content_encoding, body = dumps(converted[1], serializer=serializer)
    properties = {key: value for key, value in message.properties.items() if key in PROPERTIES}
    kept = {
        "content_type": content_type,
        "content_encoding": content_encoding,
        "headers": headers,
        "properties": properties,
        "exchange": about.get("exchange") or "",
        "routing_key": about.get("routing_key"),
        "delivery_mode": None,
        "declare": [],
    }
    return Message(
        task_id=headers["id"],
        task=task,
        queue=str(about.get("routing_key") or app.conf.task_default_queue),
        publication=publication_of(kept),
        body=as_bytes(body or b"", content_encoding),
        expires_at=time_of(headers.get("expires")),
        call=headers.get(CALL),
    )


def content_of(message: Any) -> Content:
    """Return the content that a delivery with the header of a kept message would run; kombu has decompressed it."""
    headers, body = message.headers or {}, as_bytes(message.body or b"", message.content_encoding)
    return Content(str(headers.get("task")), digest_of(body), unpacker(headers.get("compression")))


def unpacker(compression: Any) -> Callable[[bytes], bytes] | None:
    """Return the function that decompresses a message with these headers; None if it is not compressed."""
    return partial(decompress, content_type=compression) if compression else None


def publication_of(about: Mapping[str, Any], deaths: Any = None, call: str | None = None) -> str:
    """Return everything around a body as the text to be kept; InvalidValueError if it is not JSON."""
    try:
        kept = {"v": KEPT_FORMAT, "about": kombu_dumps(about)}
        if deaths:
            kept["deaths"] = deaths
        if call is not None:
            kept["call"] = call
        return json.dumps(kept)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValueError(f"The headers and options of a durable task must be JSON values: {error}") from error


def _about(message: Message) -> dict[str, Any]:
    """Return everything around the body: content type, headers, properties, routing."""
    try:
        kept = json.loads(message.publication)
        if kept["v"] != KEPT_FORMAT:
            raise NewerFormatError(
                f"message {message.task_id} is of format {kept['v']}, which this version does not read"
            )
        about: dict[str, Any] = {**kombu_loads(kept["about"]), "deaths": kept.get("deaths")}
        missing = ABOUT - about.keys()
        if not missing and not (isinstance(about["headers"], dict) and isinstance(about["properties"], dict)):
            raise TypeError("headers and properties are objects")
        if not all(isinstance(about.get(name), str | None) for name in ("content_type", "content_encoding")):
            raise TypeError("content_type and content_encoding are texts")
        if not missing:
            check_task(about["headers"])
    except NewerFormatError:
        raise
    except Exception as error:  # the decoder of any type in them may raise
        raise InvalidValueError(f"message {message.task_id} cannot be read: {type(error).__name__}: {error}") from error
    if missing:
        raise InvalidValueError(f"message {message.task_id} cannot be read: {', '.join(sorted(missing))} is missing")
    return about


def time_of(text: Any) -> datetime | None:
    """Return the time in a header, in UTC if it names no zone."""
    found: datetime | None = maybe_iso8601(text)
    return found if found is None or found.tzinfo is not None else found.replace(tzinfo=UTC)

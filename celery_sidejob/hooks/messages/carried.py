"""What a message can carry: what its serializer can encode, and its broker transport.

A call that the broker cannot carry is refused before it is kept. An error of a publication concerns either the message
or its queue. AMQP has the narrow limits: a name has one byte for its length, an integer 64 bits, and all headers and
properties of a message go into one frame. Redis has none of these limits, so only names must keep to them everywhere.

The body of a durable task is encoded as Celery would; an error says which part of it cannot be encoded. kombu takes a
dict with exactly the keys of its envelopes for an envelope, and cannot read it, or reads another value. Such a dict is
written as a list of pairs, in an envelope of ours. A process in which this module is loaded can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from struct import error as NoFit  # noqa: N812 - the struct module's error has no name of its own
from typing import Any

from amqp import Message
from amqp.exceptions import PreconditionFailed
from kombu.exceptions import EncodeError
from kombu.serialization import dumps
from kombu.utils.json import register_type

from ...model.checks import shown
from ...model.errors import InvalidValueError
from ...model.messages import Continuation
from ...model.names import MAX_LENGTH, why_not_name
from ...model.protocols import Publication

FRAME_BYTES = 131_072
"""The largest frame of a RabbitMQ with the default configuration."""
FRAME_OVERHEAD = 22
"""Bytes of the frame beside a message's headers and properties."""
OURS_BYTES = 8_192
"""How much of that frame a call must leave free: a republished message also has headers about its task's deaths."""
PUBLISH = (60, 40)
"""The number of AMQP's basic.publish: a refusal with this number concerns the message, any other the queue."""
SHOWN = 60
"""The most characters of a name in an error."""


class NewerFormatError(Exception):
    """A row was written by a newer version: newer workers handle it."""


def check_names(what: str, **names: Any) -> None:
    """Raise InvalidValueError for names (a task id, a queue) that a broker or Postgres cannot carry."""
    for name, value in names.items():
        problem = None if value is None else why_not_name(value)
        if problem is not None:
            raise InvalidValueError(f"{shown(value, most=SHOWN)} cannot be {name}= (a call of {what}): {problem}")


CELERYS = frozenset(
    {
        "lang", "task", "id", "root_id", "parent_id", "group", "group_index", "eta", "expires", "retries", "timelimit",
        "argsrepr", "kwargsrepr", "origin", "ignore_result", "shadow", "sidejob",
    }
)  # fmt: skip
"""Headers by which a worker recognises a message."""


def check_headers(what: str, headers: Any) -> None:
    """Raise InvalidValueError for a call's own headers that are no mapping, or would replace headers of the message."""
    if headers is None:
        return
    if not isinstance(headers, Mapping):
        raise InvalidValueError(f"headers of {what} is a mapping, not a {type(headers).__name__}.")
    for name in headers:
        if not isinstance(name, str) or name in CELERYS:
            raise InvalidValueError(
                f"headers of {what} hold {shown(name, most=SHOWN)}, which is not yours to set: give it another name."
            )


def check_sendable(what: str, family: str, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
    """Raise InvalidValueError if the app's broker cannot carry the headers and properties of a call."""
    if family != "amqp":
        return
    try:
        check_amqp(headers, properties, frame_bytes=FRAME_BYTES - OURS_BYTES)
    except InvalidValueError as error:
        raise InvalidValueError(f"{what} cannot be sent: {error}") from None


def check_route(exchange: Any, routing_key: Any) -> None:
    """Raise InvalidValueError for an exchange or a routing key that AMQP cannot carry."""
    for name, value in (("exchange", exchange), ("routing key", routing_key)):
        if isinstance(value, str) and len(value.encode(errors="replace")) > MAX_LENGTH:
            raise InvalidValueError(
                f"RabbitMQ cannot carry its {name}, which takes more than {MAX_LENGTH} bytes: shorten it."
            )


def check_amqp(headers: Mapping[str, Any], properties: Mapping[str, Any], *, frame_bytes: int) -> None:
    """Raise InvalidValueError for headers and properties that AMQP cannot carry; sends nothing."""
    given = {name: value for name, value in properties.items() if value is not None}
    if isinstance(given.get("expiration"), int | float):  # in seconds, which kombu sends as a text
        given["expiration"] = str(given["expiration"])
    try:
        size = len(Message(application_headers=headers, **given)._serialize_properties())
    except Exception:
        raise InvalidValueError(_culprit(headers, given)) from None
    if size + FRAME_OVERHEAD > frame_bytes:
        raise InvalidValueError(
            f"its headers and properties take {size} bytes, and RabbitMQ takes {frame_bytes - FRAME_OVERHEAD}: "
            "put large data into an argument."
        )


def is_unsendable(message: Publication, error: BaseException) -> bool:
    """Tell whether this error of a publication proves that no later try can succeed.

    Other errors may come from this process, such as a library of another version: if they counted as proof, all kept
    messages would be buried.
    """
    if isinstance(error, PreconditionFailed):
        return tuple(error.method_sig or ()) == PUBLISH
    if isinstance(message, Continuation) and isinstance(error, TypeError):  # its task does not take these arguments
        return True
    return isinstance(error, InvalidValueError)


def is_of_the_message(message: Publication, error: BaseException) -> bool:
    """Tell whether this error of a publication concerns only the message: other messages may be sent to its queue."""
    own = (ValueError, TypeError, OverflowError, NoFit, EncodeError, NewerFormatError)
    return isinstance(message, Continuation) or isinstance(error, own)


def _culprit(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    parts = [
        *(
            (f"header {shown(name, most=SHOWN)}", partial(Message, application_headers={name: value}))
            for name, value in headers.items()
        ),
        *((f"property {name!r}", partial(Message, **{name: value})) for name, value in properties.items()),
    ]
    for part, make in parts:
        try:
            make()._serialize_properties()
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            return f"RabbitMQ cannot carry its {part} ({why}): give texts, numbers within 64 bits, or lists of such."
    return "RabbitMQ cannot carry its headers and properties."


JSON = "application/json"
_ENVELOPE = {"__type__", "__value__"}
MOST_STEPS = 20
"""The most steps of a path that an error shows."""
MOST_BYTES = 100_000_000
"""The most bytes of a call's arguments. A few times as many would make a store so slow that it counts as unreachable.
"""


class UnencodableError(InvalidValueError, EncodeError):
    """Arguments that the serializer refuses; also an EncodeError, which an app may expect from a call."""


def as_bytes(data: Any, encoding: str | None = None) -> bytes:
    """Return a body as the bytes that are sent."""
    if isinstance(data, str):
        return data.encode(encoding if encoding and encoding != "binary" else "utf-8")
    return bytes(data)


def encoded(task: str, body: Any, serializer: Any, *, is_bounded: bool = True) -> tuple[str, str, bytes]:
    """Return a body's content type, content encoding and bytes; `body` has the form of task protocol 2.

    Calls by Celery itself are not bounded: a chord whose body is refused has ended.
    """
    try:
        encoded: tuple[str, str, Any] = dumps(body, serializer=serializer)
        if encoded[0] == JSON and '"__type__"' in encoded[2] and _looks_enveloped(body):
            encoded = dumps(readable(body), serializer=serializer)
    except EncodeError as error:
        for name, part in zip(("args", "kwargs", "options"), body, strict=True):
            path = _path_to_fault(part, serializer)
            if path is not None:
                raise UnencodableError(f"{name}{path} of the call of {task} cannot be encoded: {error}") from error
        raise
    data = as_bytes(encoded[2], encoded[1])
    if is_bounded and len(data) > MOST_BYTES:
        raise InvalidValueError(
            f"The arguments of the call of {task} take {len(data)} bytes, and those of a durable task take at most "
            f"{MOST_BYTES}: store large data elsewhere and pass a reference to it."
        )
    return *encoded[:2], data


def readable(value: Any) -> Any:
    """Return the value that kombu must write as JSON in order to read back an equal value."""
    if isinstance(value, dict):
        made = {key: readable(item) for key, item in value.items()}
        return _Pairs(made) if made.keys() == _ENVELOPE else made
    return [readable(item) for item in value] if isinstance(value, list | tuple) else value


class _Pairs:
    """A dict that looks like an envelope. This class is no dict itself: json would not ask how to write a dict."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.pairs = list(given.items())


register_type(_Pairs, "dict", lambda made: made.pairs, dict)


def _looks_enveloped(value: Any) -> bool:
    """Tell whether a value contains such a dict; most texts with the word only contain, for example, a datetime."""
    if isinstance(value, dict):
        return value.keys() == _ENVELOPE or any(map(_looks_enveloped, value.values()))
    return isinstance(value, list | tuple) and any(map(_looks_enveloped, value))


def _path_to_fault(value: Any, serializer: Any) -> str | None:
    """Return the steps to the innermost part that cannot be encoded, or to a part that contains itself."""
    if not _fails(value, serializer):
        return None
    steps: list[str] = []
    outer = {id(value)}
    while len(steps) < MOST_STEPS:
        step, value = next(((step, item) for step, item in _items(value) if _fails(item, serializer)), (None, None))
        if value is None:
            return "".join(steps)
        steps.append(f"[{shown(step)}]")
        if id(value) in outer:
            return "".join(steps)
        outer.add(id(value))
    return "".join(steps) + "\N{HORIZONTAL ELLIPSIS}"


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _fails(value: Any, serializer: Any) -> bool:
    try:
        dumps(value, serializer=serializer)
    except EncodeError:
        return True
    return False

"""The limits of what a broker can carry.

A call that the broker cannot carry is refused before it is kept. An error of a publication concerns either the message
or its queue. AMQP has the narrow limits: a name has one byte for its length, an integer 64 bits, and all headers and
properties of a message go into one frame. Redis has none of these limits, so only names must keep to them everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from struct import error as NoFit  # noqa: N812 - the struct module's error has no name of its own
from typing import Any

from amqp import Message
from amqp.exceptions import PreconditionFailed
from kombu.exceptions import EncodeError

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

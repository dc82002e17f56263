"""Encodes the body of a durable task as Celery would, or says which part of it cannot be encoded.

kombu takes a dict with exactly the keys of its envelopes for an envelope, and cannot read it, or reads another value.
Such a dict is written as a list of pairs, in an envelope of ours. A process in which this module is loaded can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kombu.exceptions import EncodeError
from kombu.serialization import dumps
from kombu.utils.json import register_type

from ...model.checks import shown
from ...model.errors import InvalidValueError

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

"""Our JSON codec: the values that a packet, a state key or an argument may have, and how they come back equal.

kombu's own codec is nearly this, but it fails on user data that looks like its envelopes, and it accepts values that
cannot come back (NaN, integer keys, lone surrogates). This codec uses kombu's envelopes, with three differences:

- a value that would not come back equal is refused, with the path to the offending part;
- a dict of the user's that has exactly the keys of an envelope is itself put into an envelope, ``"dict"``;
- envelopes are opened from the outside in: the contents of such a dict are never mistaken for one of our envelopes.

The text is ASCII, and thus survives any database encoding; a character beyond ASCII counts six bytes or twelve.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from math import inf, isfinite
from typing import Any, NoReturn
from uuid import UUID

from .errors import InvalidValueError

MAX_DEPTH = 500
"""Levels of nesting in the text. Fixed, because a reader may have much less free stack than the writer had."""

_WRITTEN_ALIKE = (str, int, bool, bytes, type(None))
"""Types whose equal values are always written alike."""
_SHOWN_ALIKE = (float, datetime)
"""Types whose equal values are written alike only if Python shows them alike: 0.0 == -0.0, and noon is 13:00 elsewhere.
"""

MAX_DIGITS = sys.int_info.default_max_str_digits
"""The most digits of an integer. Python's default, even if this process allows more: other processes must read it."""


def encode(value: Any, *, limit: int | None = None, what: str = "value") -> str:
    """Return the ASCII JSON text that `decode` turns into an equal value, or refuse it with the path to the fault.

    `what` names the value in messages: ``value["a"][3]: nan is not a JSON value``. `limit` is in bytes of the text.
    Tuples come back as lists, members of string and integer enums as their values, an object with ``__json__()`` as the
    value that it returns, and an aware datetime with a fixed offset. A value that is much too large is not encoded.
    """
    try:
        text = _ENCODER.encode(_checked(value, 1, _Room(limit)))
    except _RefusedError as refused:
        raise InvalidValueError(f"{what}{refused.path()}: {refused.reason}") from None
    except RecursionError:
        raise InvalidValueError(
            f"{what}: nested too deeply for what is left of this thread's stack, or contains itself"
        ) from None
    if limit is not None and len(text) > limit:
        raise InvalidValueError(f"{what}: {_too_large(len(text), limit)}")
    return text


def _too_large(size: object, limit: float) -> str:
    return (
        f"{size} bytes of JSON exceed the limit of {limit} (setting sidejob_max_value_bytes); "
        "store large data elsewhere and pass a reference to it"
    )


def decode(text: str) -> Any:
    """Return the value for a text made by `encode`."""
    value = json.loads(text)
    # Quotes inside a string are escaped: this finds only keys and strings that are exactly the word.
    return _opened(value) if '"__type__"' in text else value


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values are written alike; False where only their types could tell."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if kind in _SHOWN_ALIKE:
        return repr(one) == repr(other)
    return kind in _WRITTEN_ALIKE and bool(one == other)


def has_escapes(text: str) -> bool:
    """Tell whether a text made by `encode` has a dict of the user's that looks like an envelope."""
    return f'{{"__type__":"{_ESCAPED}",' in text


# _checked bounds the depth, which makes json's own search for cycles superfluous.
_ENCODER = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":"))

_ENVELOPE = {"__type__", "__value__"}

_ESCAPED = "dict"

# datetime comes before date, of which it is a subclass. The forms are kombu's.
_TO_ENVELOPE: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (datetime, "datetime", datetime.isoformat),
    (date, "date", date.isoformat),
    (time, "time", time.isoformat),
    (Decimal, "decimal", lambda value: _decimal_text(value)),
    (UUID, "uuid", lambda value: {"hex": value.hex}),
)

_FROM_ENVELOPE: dict[str, Callable[[Any], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "decimal": Decimal,
    "uuid": lambda value: UUID(**value),
}

_INSTEAD: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((bytes, bytearray, memoryview), "pass text instead, for instance base64"),
    ((set, frozenset), "pass a list instead"),
    (Enum, "pass its value instead"),
)


class _Room:
    """The remaining part of a limit, by the least that values take as JSON: a character one byte, an item two."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int | None) -> None:
        self.left = self.limit = inf if limit is None else limit

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise _RefusedError(_too_large(f"more than {self.limit}", self.limit))


def _checked(value: Any, depth: int, room: _Room) -> Any:  # noqa: PLR0912, PLR0915 - a level takes one frame
    """Return `value` itself if json can write it unchanged, else the object that json is to write for it.

    Copies are made only where something changes: most values are plain JSON and cost one walk. A level of nesting takes
    one frame of the stack, to fit `MAX_DEPTH` levels into the stack of a Python thread.
    """
    kind = type(value)
    if kind is str:
        room.take(len(value))
        if value.isascii():  # the most frequent case
            return value
    if kind in _ATOMS:
        _ATOMS[kind](value)
        return value
    # By the class and not by isinstance: a proxy claims the class of its target, and json is not fooled.
    if issubclass(kind, dict):
        plain: Any = _with_plain_keys(value if kind is dict else dict(value.items()))
        escaped = plain.keys() == _ENVELOPE
        room.take(sum(map(len, plain)))
    elif issubclass(kind, (list, tuple)):
        plain, escaped = (value if kind is list else list(value)), False
    else:
        return _checked_object(value, depth, room)
    depth += escaped  # the escape is a level of its own
    _check_depth(depth)
    room.take(2 * len(plain))
    result = plain
    for step, item in plain.items() if type(plain) is dict else enumerate(plain):
        try:
            checked = _checked(item, depth + 1, room)
        except _RefusedError as refused:
            refused.steps.append(step)
            raise
        if checked is not item:
            if result is plain:
                result = plain.copy()
            result[step] = checked
    return {"__type__": _ESCAPED, "__value__": result} if escaped else result


def _checked_object(value: Any, depth: int, room: _Room) -> Any:
    kind = type(value)
    # Enums with one of these bases, Django's SafeString, numpy's float64: json writes the base's value.
    for base, held in _HELD:
        if issubclass(kind, base):
            _checked(held(value), depth, room)
            return value
    for known, tag, payload in _TO_ENVELOPE:
        if issubclass(kind, known):
            _check_depth(depth + 1)
            return {"__type__": tag, "__value__": payload(value)}
    to_json = None if kind is type else getattr(value, "__json__", None)
    if to_json is None:
        _refuse(value)
    _check_depth(depth)  # it may return itself
    return _checked(to_json(), depth + 2, room)  # two, because this takes two frames


def _refuse(value: Any) -> NoReturn:
    reason = f"a value of type {type(value).__name__} is not a JSON value"
    for kinds, instead in _INSTEAD:
        if isinstance(value, kinds):
            reason = f"{reason}: {instead}"
    raise _RefusedError(reason)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _RefusedError(f"nested more than {MAX_DEPTH} levels deep, or contains itself")


def _with_plain_keys(value: dict[Any, Any]) -> dict[str, Any]:
    all_plain = True
    for key in value:
        if type(key) is not str:
            if not isinstance(key, str):
                raise _RefusedError(f"keys must be strings, not {_shown_key(key)}")
            all_plain = False
        if not key.isascii():
            _check_text(key, "a key")
    if all_plain:
        return value
    # Members of string enums and the like. Two keys that differ only in their class would become one.
    plain = {str.__str__(key): item for key, item in value.items()}
    if len(plain) < len(value):
        raise _RefusedError("two keys become the same string")
    return plain


def _check_text(text: str, what: str = "the text") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at, found = error.start, ascii(text[error.start])
        raise _RefusedError(f"{what} holds a lone surrogate {found} at index {at}, which is no character") from None


def _check_finite(number: float) -> None:
    if not isfinite(number):
        raise _RefusedError(f"{number} is not a JSON value")


def _decimal_text(number: Decimal) -> str:
    if not number.is_finite():
        raise _RefusedError(f"the Decimal {number} is not a JSON value")
    return str(number)


def _check_digits(number: int) -> None:
    if number.bit_length() < 2000:  # below the lowest limit that Python allows (640 digits)
        return
    try:
        # Above this size str() would be slow as well as forbidden.
        too_large = number.bit_length() > MAX_DIGITS * 3.33 or len(str(abs(number))) > MAX_DIGITS
    except ValueError:  # this process allows fewer digits (PYTHONINTMAXSTRDIGITS)
        too_large = True
    if too_large:
        raise _RefusedError(f"an integer of {number.bit_length()} bits is too large: pass it as a string")


def _shown_key(key: Any) -> str:
    short = key is None or isinstance(key, (bool, float)) or (isinstance(key, int) and key.bit_length() <= 64)
    return f"{key!r} ({type(key).__name__})" if short else f"a {type(key).__name__}"


def _opened(value: Any) -> Any:
    """Return a freshly parsed value with its envelopes opened; containers are changed in place."""
    kind = type(value)
    if kind is list:
        for index, item in enumerate(value):
            value[index] = _opened(item)
    elif kind is dict:
        if value.keys() == _ENVELOPE:
            tag, value = value["__type__"], value["__value__"]
            if tag != _ESCAPED or type(value) is not dict:
                return _from_envelope(tag, value)
        for key, item in value.items():
            value[key] = _opened(item)
    return value


def _from_envelope(tag: Any, payload: Any) -> Any:
    try:
        build = _FROM_ENVELOPE[tag]
    except (KeyError, TypeError):
        raise InvalidValueError(
            f"this text holds a value of unknown type {tag!r}: not written by this package, or by a newer version"
        ) from None
    return build(payload)


class _RefusedError(Exception):
    """A part of the value is refused. The walk adds its steps on the way out: a good value costs nothing."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str | int] = []  # innermost first

    def path(self) -> str:
        steps = [f"[{json.dumps(step if isinstance(step, int) else step[:100])}]" for step in reversed(self.steps)]
        return "".join(steps if len(steps) <= 20 else [*steps[:20], "…"])


# Types that json writes unchanged, each with the check for its faults.
_ATOMS: dict[type, Callable[[Any], None]] = {
    str: _check_text,
    int: _check_digits,
    float: _check_finite,
    bool: lambda value: None,
    type(None): lambda value: None,
}

_HELD: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)

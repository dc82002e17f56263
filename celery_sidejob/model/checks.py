"""Checks of given values: arguments of calls, options of tasks, settings, fields of messages.

They come before any statement: Postgres' own errors do not name the argument. The rules for names are in `names`.

Functions too are given: bodies of tasks, hooks and steps. They must have done their work when they return; calling an
`async def` or a generator function runs nothing, and returns a value that looks like a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeGuard

from .errors import InvalidValueError, SettingsError
from .names import MAX_LENGTH, why_not_storable

MOST = 2**63 - 1
"""The largest number that fits a bigint in Postgres."""
MOST_CHARACTERS = 1_000_000
"""The most characters of a text that only people read: the reason of a pause, a message of the history."""
LONGEST_S = 10_000_000_000.0
"""Three hundred years; the limits of Postgres and Python are not far beyond."""
MOST_S = f"at most {LONGEST_S:.0f}"
SECONDS = f"a number of seconds from 0 to {LONGEST_S:.0f}"
NEAR = 0.8
"""How similar a name must be to be suggested: one letter of six is wrong."""
NEAR_PART = 0.7
"""How similar each part of a dotted name must be: two of four letters have changed places."""
SLIP = 0.85
"""How similar a name must be to count as a misspelling: one letter is wrong, or two have changed places."""

Form = tuple[str, Callable[[Any], bool]]
"""The values that an option may have: as words for the error, and as a check."""


def is_number(value: object, *, least: int = 0, most: int = MOST) -> TypeGuard[int]:
    """Tell whether `value` is a whole number from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_seconds(value: Any, *, least: float = 0.0) -> bool:
    """Tell whether `value` is a number of seconds, from `least` to `LONGEST_S`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LONGEST_S


def is_near(value: Any) -> bool:
    """Tell whether `value` is a number of seconds, from now or ago."""
    return is_seconds(value, least=-LONGEST_S)


def is_in_calendar(time: datetime) -> bool:
    """Tell whether a time exists in every time zone and in the store; it may be naive."""
    return datetime(1, 1, 3) <= time.replace(tzinfo=None) <= datetime(9999, 12, 29)


def in_seconds(value: Any) -> Any:
    """Return a timedelta as seconds, and any other value unchanged."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def check_age(name: str, age: Any, *, form: str = f"a timedelta or {SECONDS}") -> float | None:
    """Return an age in seconds, None for None; raise InvalidValueError for a value that is not of this `form`."""
    age_s = in_seconds(age)
    if age_s is not None and not is_seconds(age_s):
        raise InvalidValueError(f"{name} is {form}, not {shown(age)}.")
    return None if age_s is None else float(age_s)


def is_keepable(text: str) -> bool:
    """Tell whether a row can contain this text; a row can only be found by such a text."""
    return why_not_storable(text, max_length=len(text)) is None


def is_text(value: object) -> TypeGuard[str]:
    """Tell whether `value` is a text that a row can contain."""
    return isinstance(value, str) and is_keepable(value)


def check_number(name: str, number: Any, *, of: str, least: int = 0) -> None:
    """Raise InvalidValueError unless `number` is a whole number of at least `least`; `of` names the things counted."""
    if not is_number(number, least=least):
        raise InvalidValueError(f"{name} is a number of {of}, at least {least}, not {shown(number)}.")


def check_texts(**texts: Any) -> None:
    """Raise InvalidValueError unless each argument is None or a text that a row can contain."""
    for name, text in texts.items():
        _check_text(name, text, max_length=MOST_CHARACTERS)


def check_label(name: str, label: Any) -> Any:
    """Return a short text by which jobs can be found, or None; raise InvalidValueError for anything else."""
    if label == "":
        raise InvalidValueError(f"'' cannot be {name}=: it is empty")
    _check_text(name, label, max_length=MAX_LENGTH)
    return label


def _check_text(name: str, text: Any, *, max_length: int) -> None:
    if text is None:
        return
    problem = why_not_storable(text, max_length=max_length) if isinstance(text, str) else "it is not a string"
    if problem:
        raise InvalidValueError(f"{shown(text)} cannot be {name}=: {problem}")


def misfit(options: Mapping[str, Any], forms: Mapping[str, Form]) -> str | None:
    """Say which option has an invalid value: "on_lost is 'requeue' or 'dead', not 'ded'".

    None counts as an option that is not given.
    """
    for name, (form, fits) in forms.items():
        value = options.get(name)
        if value is not None and not fits(value):
            return f"{name} is {form}, not {shown(value)}"
    return None


def nearest(name: str, known: Iterable[str], *, like: float = NEAR) -> str | None:
    """Return the known name most similar to this name; None if none is similar enough (1.0 is the same name).

    In dotted names each part must be similar, because the names of a module's tasks share their first parts. The first
    parts may be missing.
    """
    parts = name.split(".")
    ends = {".".join(one.split(".")[-len(parts) :]): one for one in known}
    for end in get_close_matches(name, ends, 3, like):
        if all(
            get_close_matches(part, [other], 1, NEAR_PART) for part, other in zip(parts, end.split("."), strict=False)
        ):
            return ends[end]
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: a suggestion, or an empty text."""
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near not in (None, name) else ""


def text_of(value: Any) -> str:
    """Return a value as text; InvalidValueError if it is nested too deeply for that."""
    try:
        return str(value)
    except RecursionError:
        raise InvalidValueError(f"{shown(value)} is no name: it is nested too deeply.") from None


def shown(value: Any, *, most: int = 100) -> str:
    """Return a value as an error shows it: in ASCII, with at most this many characters."""
    try:
        text = ascii(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


_PLAIN = (FunctionType, MethodType, BuiltinFunctionType, partial, type)

_NOT_ORDINARY: tuple[tuple[Callable[[Any], bool], Callable[[Any], bool], str, str], ...] = (
    # The first is only for `check_returned`: an `async def` is awaited.
    (inspect.iscoroutinefunction, inspect.iscoroutine, "an async def", "run that inside of it with asyncio.run(...)"),
    (
        inspect.isasyncgenfunction,
        inspect.isasyncgen,
        "an asynchronous generator",
        "run that inside of it with asyncio.run(...)",
    ),
    (inspect.isgeneratorfunction, inspect.isgenerator, "a generator", "have it go through its values itself"),
)


def check_function(function: Any, what: str) -> None:
    """Refuse a generator function, which does not run when it is called; `what` names it. An `async def` is awaited."""
    called = function if isinstance(function, _PLAIN) else type(function).__call__
    for is_kind, _, kind, instead in _NOT_ORDINARY[1:]:
        if is_kind(function) or is_kind(called):
            raise SettingsError(
                f"{what} is {kind}: a worker that calls it runs nothing of it. Make it an ordinary function, and "
                f"{instead}."
            )


def check_returned(value: Any, what: str) -> Any:
    """Return the value of a body; refuse a coroutine or a generator, of which nothing has run yet."""
    for _, is_kind, kind, instead in _NOT_ORDINARY:
        if is_kind(value):
            if not inspect.isasyncgen(value):
                value.close()  # otherwise Python warns that it was never awaited
            raise InvalidValueError(
                f"{what} has returned what {kind} makes, and nothing of that has run. Make it an ordinary function, "
                f"and {instead}."
            )
    return value

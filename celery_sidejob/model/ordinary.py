"""Functions must have done their work when they return: bodies of tasks, hooks and steps.

Calling an `async def` or a generator function runs nothing, and returns a value that looks like a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from .errors import InvalidValueError, SettingsError

_PLAIN = (FunctionType, MethodType, BuiltinFunctionType, partial, type)

_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], bool], str, str], ...] = (
    (inspect.iscoroutinefunction, inspect.iscoroutine, "an async def", "run that inside of it with asyncio.run(...)"),
    (
        inspect.isasyncgenfunction,
        inspect.isasyncgen,
        "an asynchronous generator",
        "run that inside of it with asyncio.run(...)",
    ),
    (inspect.isgeneratorfunction, inspect.isgenerator, "a generator", "have it go through its values itself"),
)


def check(function: Any, what: str, *, may_await: bool = False) -> None:
    """Refuse a function that does not run when it is called, unless its caller awaits it; `what` names it."""
    called = function if isinstance(function, _PLAIN) else type(function).__call__
    for is_kind, _, kind, instead in _KINDS[may_await:]:
        if is_kind(function) or is_kind(called):
            raise SettingsError(
                f"{what} is {kind}: a worker that calls it runs nothing of it. Make it an ordinary function, and "
                f"{instead}."
            )


def done(value: Any, what: str) -> Any:
    """Return the value of a body; refuse a coroutine or a generator, of which nothing has run yet."""
    for _, is_kind, kind, instead in _KINDS:
        if is_kind(value):
            if not inspect.isasyncgen(value):
                value.close()  # otherwise Python warns that it was never awaited
            raise InvalidValueError(
                f"{what} has returned what {kind} makes, and nothing of that has run. Make it an ordinary function, "
                f"and {instead}."
            )
    return value

"""What the body of a task may be: a function that has done its work when it returns.

To call an `async def` or a generator function runs nothing of it, and gives back something that looks like a result.
"""

from __future__ import annotations

import inspect
import traceback as tracebacks
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from celery.app.task import Task

from ..model.errors import InvalidValueError, JobFailed, SettingsError
from ..model.names import storable

_PLAIN = (FunctionType, MethodType, BuiltinFunctionType, partial, type)

_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any], bool], str, str], ...] = (
    (inspect.iscoroutinefunction, inspect.iscoroutine, "an async def", "run that inside of it with asyncio.run(...)"),
    (inspect.isasyncgenfunction, inspect.isasyncgen, "an asynchronous generator",
     "run that inside of it with asyncio.run(...)"),
    (inspect.isgeneratorfunction, inspect.isgenerator, "a generator", "have it go through its values itself"),
)  # fmt: skip


def check(function: Any, what: str) -> None:
    """Refuse a function that Python does not run when it is called; `what` names it."""
    called = function if isinstance(function, _PLAIN) else type(function).__call__
    for is_kind, _, kind, instead in _KINDS:
        if is_kind(function) or is_kind(called):
            raise SettingsError(
                f"{what} is {kind}: a worker that calls it runs nothing of it. Make it an ordinary function, and "
                f"{instead}."
            )


def check_hook(function: Any, what: str) -> None:
    """Refuse a hook that cannot be called with the job alone, or that Python does not run when it is called."""
    check(function, what)
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may give what it wraps more
    except ValueError:
        return  # a builtin, which has none
    except TypeError:
        raise SettingsError(f"{what} is no function: give one whose only argument is the job.") from None
    try:
        signature.bind(None)
    except TypeError:
        raise SettingsError(
            f"{what} takes {signature}, and is called with the job alone: make it (job), or give its other arguments "
            "a default."
        ) from None


def done(value: Any, what: str) -> Any:
    """Return what a body has returned; refuse a coroutine or a generator, of which nothing has run yet."""
    for _, is_kind, kind, instead in _KINDS:
        if is_kind(value):
            if not inspect.isasyncgen(value):
                value.close()  # else Python warns that nobody has awaited it
            raise InvalidValueError(
                f"{what} has returned what {kind} makes, and nothing of that has run. Make it an ordinary function, "
                f"and {instead}."
            )
    return value


def text_of(error: BaseException) -> str:
    """Return the text of an error that a body has raised, as the store can keep it; its `str()` may raise too."""
    try:
        return storable(str(error))
    except Exception:
        return "<its str() raises>"


def traceback_of(error: BaseException) -> str:
    """Return its traceback as a text that the store can keep."""
    return storable("".join(tracebacks.format_exception(error)))


def unstorable(error: BaseException | None, refusal: Exception) -> InvalidValueError:
    """Return the error with which a run ends that has raised `error`, or nothing, if that end is refused."""
    how = "well" if error is None else f"with {type(error).__name__}"
    return InvalidValueError(
        f"The run ended {how}, and that cannot be stored ({type(refusal).__name__}). The log of its worker has both."
    )


def group_of(error: BaseException | None) -> str | None:
    """Return the failure group that a body has named; None if it is the class of its error."""
    return error.group if isinstance(error, JobFailed) else None


def call_of(task: Any, marker: type[Task]) -> Callable[..., Any] | None:
    """Return the ``__call__`` of the project's own task class, which is below our `marker`; None if it has none."""
    mro = type(task).__mro__
    for cls in mro[mro.index(marker) + 1 if marker in mro else 0 :]:
        if cls is not Task and "__call__" in cls.__dict__:
            found: Callable[..., Any] = cls.__dict__["__call__"]
            return found
    return None

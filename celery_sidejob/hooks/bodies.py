"""The body of a task: checks of its hooks, its call, its outcome, how errors are stored; the base of our task classes.

The base has `delay_on_commit` and `apply_async_on_commit` of Celery's task for Django. Celery's methods call after the
commit: if the process dies just then, the call is lost. Ours are part of the transaction.
"""

from __future__ import annotations

import inspect
import traceback as tracebacks
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery.app.task import Task

from ..model.checks import check_function, check_returned
from ..model.errors import InvalidValueError, JobFailed, SchemaError, SettingsError
from ..model.names import storable
from ..pools import coroutines
from .patches import become


@dataclass(frozen=True, slots=True)
class Outcome:
    """The value of a run's body, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None
    rests: bool = False
    """Whether it has neither: it is suspended, will be tried again, or must not run."""


def check_hook(function: Any, what: str) -> None:
    """Refuse a hook that cannot be called with only the job, or that does not run when it is called."""
    check_function(function, what)
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a wrapper may pass more to the wrapped function
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


def result_of(value: Any, what: str) -> Any:
    """Return what a body or a hook has returned, or what its coroutine returns in the end; refuse a generator."""
    return check_returned(coroutines.run(value) if inspect.iscoroutine(value) else value, what)


def traceback_of(error: BaseException) -> str:
    """Return its traceback as a text that the store can keep."""
    return storable("".join(tracebacks.format_exception(error)))


def unstorable(error: BaseException | None, refusal: Exception) -> InvalidValueError:
    """Return the error of a run that has raised `error`, or no error, if the store refuses that end."""
    how = "well" if error is None else f"with {type(error).__name__}"
    return InvalidValueError(
        f"The run ended {how}, and that cannot be stored ({type(refusal).__name__}). The log of its worker has both."
    )


def group_of(error: BaseException | None) -> str | None:
    """Return the failure group that a body has named; None if the group is the class of its error."""
    return error.group if isinstance(error, JobFailed) else None


def call_of(task: Any, marker: type[Task]) -> Callable[..., Any] | None:
    """Return the ``__call__`` of the project's own task class, which is below our `marker`; None if it has none."""
    mro = type(task).__mro__
    for cls in mro[mro.index(marker) + 1 if marker in mro else 0 :]:
        if cls is not Task and "__call__" in cls.__dict__:
            found: Callable[..., Any] = cls.__dict__["__call__"]
            return found
    return None


class OnCommit(Task):
    """A base of our marker classes, above the project's own class."""

    abstract = True

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task in Django's transaction: `apply_async_on_commit`, for Celery's task of Django."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Call the task as part of Django's transaction, if that is in the store's database; returns its result.

        If Django's default database is not the store's, the task is called just after the commit, as Celery does.
        """
        above = super()
        if not hasattr(above, "apply_async_on_commit"):
            raise AttributeError(
                f"{self.name}.apply_async_on_commit() is for tasks of Django; use apply_async(transaction=...)."
            )
        from django.db import connection

        if connection.vendor == "postgresql" and not self._get_app().conf.task_always_eager:
            with suppress(SchemaError):
                return self.apply_async(args, kwargs, transaction=connection, **options)
        return above.apply_async_on_commit(args, kwargs, **options)


class MadeEarly(Task):
    """A base for a Django task that is made before its app is finalized: the task may be durable by then.

    A call in Django's transaction, for which Celery would not finalize the app, finds that out first.
    """

    abstract = True
    delay_on_commit = OnCommit.delay_on_commit

    def apply_async_on_commit(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Call the task in or after Django's transaction."""
        if not isinstance(self, OnCommit):
            self._get_app().finalize(auto=True)
            if isinstance(self, OnCommit):
                return self.apply_async_on_commit(args, kwargs, **options)
        return super().apply_async_on_commit(args, kwargs, **options)


def made_early(task: Any) -> Any:
    """Make a task that was made before its app is finalized check at such a call whether it is durable; return it."""
    if hasattr(task, "apply_async_on_commit") and not isinstance(task, OnCommit | MadeEarly):
        become(task, MadeEarly, type(task), abstract=True)
    return task

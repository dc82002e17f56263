"""`delay_on_commit` and `apply_async_on_commit` of Celery's task for Django, for jobs and durable tasks.

Celery's methods call after the commit: if the process dies just then, the call is lost. Ours are part of the
transaction.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery.app.task import Task

from ..model.errors import SchemaError
from .patches.wrapping import become


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

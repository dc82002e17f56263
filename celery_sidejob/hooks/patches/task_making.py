"""Replaces `finalize`, `_task_from_fun` and `register_task` of one `Celery`; read in Celery 5.5.0 and 5.7.0.

Every task of an app is made by one of the latter two, most of them while the app is finalized. The signal that tells of
the end of that, `on_after_finalize`, only logs what a receiver raises; wrong options of a task are to be refused. So
ours looks at all tasks after `finalize`, and at each task that is made later. If a later Celery makes tasks in another
way, those are not durable whatever they say, and their options are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from ...model.errors import SettingsError
from .wrapping import wrap


def make(app: Celery, function: Callable[..., Any], **options: Any) -> Any:
    """Make a task of a function now: `app.task` is a project's to override, and may put it off."""
    return app._task_from_fun(function, **options)


def install(app: Celery, *, made: Callable[[Any], Any], completed: Callable[[], None]) -> None:
    """Have `made` return what stands for a new task, and `completed` called whenever the app is to be complete."""

    def finalize(before: Callable[..., None], auto: bool = False) -> None:
        try:
            before(auto=auto)
            completed()
        except SettingsError:
            app.__dict__.pop("tasks", None)  # kept where something has looked at them while the app was finalized
            raise

    def make_and_tell(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return made(before(*args, **options))

    wrap(app, "finalize", finalize)
    wrap(app, "_task_from_fun", make_and_tell)
    wrap(app, "register_task", make_and_tell)

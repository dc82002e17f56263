"""Turns each durable task of an app into a `DurableTask`, and refuses wrong options of all tasks."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.app.task import Task

from ...model.checks import check_function
from ...model.errors import SettingsError
from ...pools.coroutine_task import let_run
from .. import bodies
from ..durability import is_durable, known_tasks
from ..on_commit import made_early
from ..patches import app_methods
from ..patches.wrapping import become
from ..task_options import OF_ORDINARY_TASKS, check_capacity, check_durable, check_ordinary
from .durable_task import DurableTask


def mark(app: Celery) -> None:
    """Turn each durable task of the app into a `DurableTask`, if it is not one already; let each `async def` run."""
    for task in list(known_tasks(app).values()):
        let_run(task)
        if isinstance(task, DurableTask) or is_durable(app, task.name):
            _mark(app, task)


def watch_tasks(app: Celery) -> None:
    """Refuse wrong options of all tasks, and mark tasks that are made after the app is finalized.

    Modules that are imported late make such tasks. An error in the finalization of an app is raised again at each use
    of its tasks.
    """
    app_methods.tell_of_tasks(app, made=partial(_mark_if_final, app), completed=partial(_check_all, app))


def _check_all(app: Celery) -> None:
    for task in list(known_tasks(app).values()):
        _check(app, task)


def _mark_if_final(app: Celery, task: Any) -> Any:
    let_run(task)  # eager mode may call it before the app is finalized
    if app.finalized:
        _check(app, task)
        if is_durable(app, task.name):
            _mark(app, task)
        return task
    return made_early(task)


def _check(app: Celery, task: Any) -> None:
    if getattr(task, "sidejob", False):
        return
    check_ordinary(task, app.Task)
    durable = is_durable(app, task.name)
    if not durable:
        check_capacity(task)
    if durable or getattr(task, "durable", None) is not None:
        check_durable(task)
    if durable and bodies.call_of(task, DurableTask) is None:
        body = getattr(task, "_orig_run", task.run)  # without the wrapper of autoretry_for
        check_function(body, f"The body of {task.name}, which is durable,", may_await=True)


def _mark(app: Celery, task: Any) -> None:
    cls = type(task)
    if isinstance(task, DurableTask):
        if not isinstance(task, app.Task):  # made with base=DurableTask: the project's own class belongs below it
            become(task, cls, app.Task)
        return
    options = {name: getattr(task, name) for name in OF_ORDINARY_TASKS if hasattr(task, name)}
    # A custom Request of the task's own class would not get the facts that a row needs.
    if task.Request != Task.Request:
        raise SettingsError(f"{task.name} is durable and has a Request of its own ({task.Request}): use either.")
    become(task, DurableTask, cls, **options, abstract=True)

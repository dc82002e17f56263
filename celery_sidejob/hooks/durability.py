"""Tells which tasks are durable, and whether their lost runs are repeated."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from celery import Celery

REQUEUE = "requeue"
"""The policy of repeatable tasks."""
UNLOCK = "celery.chord_unlock"
"""The task by which Celery waits for the parts of a chord if the backend does not count them. It is repeatable."""


def is_durable(app: Celery, name: str) -> bool:
    """Tell whether the messages of a task are kept: its option `durable`, or `sidejob_durable_tasks`."""
    if not app.finalized and app.autofinalize:
        # Otherwise a task that is sent by its name may not be known yet, though its module is imported.
        app.finalize(auto=True)
    task = known_tasks(app).get(name)
    if task is not None and getattr(task, "sidejob", False):
        return False  # but its jobs are
    own = getattr(task, "durable", None)
    if own is not None:
        return bool(own)
    sidejob = getattr(app, "sidejob", None)
    return sidejob is not None and any(matches(name, glob) for glob in sidejob.durable_globs)


def known_tasks(app: Celery) -> Mapping[str, Any]:
    """Return the tasks that the app has so far; `app.tasks` would complete the app, or refuse to."""
    tasks: Mapping[str, Any] = app._tasks
    return tasks


def lost_policy(task: Any) -> str:
    """Return the policy for a run whose worker died, from the task's options."""
    chosen: str | None = getattr(task, "on_lost", None)
    may_repeat = (task.acks_late and task.reject_on_worker_lost) or task.name == UNLOCK
    return chosen or (REQUEUE if may_repeat else "dead")


def matches(name: str, glob: str) -> bool:
    """Tell whether a pattern of `sidejob_durable_tasks` matches this task.

    Only a pattern with the same beginning matches Celery's own tasks and ours.
    """
    for own in ("celery.", "celery_sidejob."):
        if name.startswith(own) and not glob.startswith(own):
            return False
    return fnmatch.fnmatchcase(name, glob)

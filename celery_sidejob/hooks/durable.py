"""Which ordinary tasks are durable, and which options they may have."""

from __future__ import annotations

import fnmatch
from typing import Any

from celery import Celery

from ..model.durable import ON_LOST
from ..model.errors import SettingsError


def is_durable(app: Celery, name: str) -> bool:
    """Tell whether the messages of a task are kept: its option `durable`, or `sidejob_durable_tasks`."""
    if not app.finalized and app.autofinalize:
        # Else a task that is sent by its name may not be known yet, though its module is imported.
        app.finalize(auto=True)
    task = app._tasks.get(name)
    if task is not None and getattr(task, "sidejob", False):
        return False  # its jobs are
    own = getattr(task, "durable", None)
    if own is not None:
        return bool(own)
    sidejob = getattr(app, "sidejob", None)
    return sidejob is not None and any(_matches(name, glob) for glob in sidejob.durable_globs)


def lost_policy(task: Any) -> str:
    """Return what becomes of a run whose worker died, as the task's options say."""
    chosen: str | None = getattr(task, "on_lost", None)
    return chosen or ("requeue" if task.acks_late and task.reject_on_worker_lost else "dead")


def check_options(task: Any) -> None:
    """Refuse wrong options of a durable task, which may not have been made a `DurableTask` yet."""
    if task.durable not in (True, False, None):
        raise SettingsError(f"durable is True or False, not {task.durable!r} ({task.name}).")
    policy, losses = getattr(task, "on_lost", None), getattr(task, "max_losses", None)
    if policy not in (None, *ON_LOST):
        raise SettingsError(f"on_lost is 'requeue' or 'dead', not {policy!r} ({task.name}).")
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, int) or losses < 1):
        raise SettingsError(f"max_losses is a number of runs, at least 1, not {losses!r} ({task.name}).")
    late = getattr(task, "locks_late", None)
    if late not in (True, False, None):
        raise SettingsError(f"locks_late is True or False, not {late!r} ({task.name}).")
    if late and lost_policy(task) != "requeue":
        raise SettingsError(
            f"locks_late is for tasks that may be repeated, and {task.name} must not be (on_lost is 'dead'): of a run "
            "that dies before its lock nothing is known, so it begins again. Say on_lost='requeue' if it may, or leave "
            "locks_late out."
        )


def _matches(name: str, glob: str) -> bool:
    """Celery's own tasks and ours are meant only by a pattern that begins as they do."""
    for own in ("celery.", "celery_sidejob."):
        if name.startswith(own) and not glob.startswith(own):
            return False
    return fnmatch.fnmatchcase(name, glob)

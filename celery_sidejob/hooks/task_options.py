"""The options of tasks that are ours, and which names are meant to be: those of sidejob tasks before any app exists.

Celery lets any attribute stand on a task, so a name of ours with a slip in it would be one that nobody looks at.
"""

from __future__ import annotations

import difflib
from datetime import timedelta
from functools import cache
from typing import Any

from celery.app.task import Task

from ..model.errors import SettingsError
from ..model.port import parse_ports

LATER_OPTIONS = frozenset({"run_rate", "on_run_rate", "publish_status", "capacity"})
"""Refused as long as nothing acts on them."""

OF_OTHERS = frozenset({"durable", "locks_late"})
"""Options of ours that are for ordinary tasks."""

OWN_OPTIONS = LATER_OPTIONS | OF_OTHERS | {
    "inports", "outports", "lease_renewal", "lease", "max_losses", "on_lost", "retention",
}  # fmt: skip

OF_ORDINARY_TASKS = frozenset({"durable", "on_lost", "max_losses", "locks_late"})

PLAIN_WORDS = frozenset({"lease", "retention", "capacity"})
"""Options of ours that a project may well have as attributes of its ordinary tasks, with a meaning of its own."""

CLOSE = 0.85
"""How like one of ours a name is that was meant to be it: a slip of one letter, or two letters that changed places."""


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse wrong options, and return a copy of the others."""
    for name in sorted(options.keys() - OWN_OPTIONS):
        meant = _meant(name, OWN_OPTIONS)
        if meant is not None:
            raise SettingsError(f"{name!r} is no option of a sidejob task. Did you mean {meant!r}?")
    for name in sorted(LATER_OPTIONS & options.keys()):
        raise SettingsError(f"The task option {name!r} is not supported yet: leave it out.")
    for name in sorted(OF_OTHERS & options.keys()):
        raise SettingsError(
            f"The task option {name!r} is for ordinary tasks; a sidejob task makes jobs, which are durable as they "
            "are: leave it out."
        )
    parse_ports(options.get("inports", ()), where="inports")
    parse_ports(options.get("outports", ()), where="outports")
    renewal = options.get("lease_renewal", "auto")
    if renewal not in ("auto", "manual"):
        raise SettingsError(f"lease_renewal is 'auto' or 'manual', not {renewal!r}.")
    if (renewal == "manual") != (options.get("lease") is not None):
        raise SettingsError('lease= is the deadline of a run with lease_renewal="manual": give both, or neither.')
    lease = options.get("lease")
    if lease is not None and (isinstance(lease, bool) or not isinstance(lease, int | float) or not lease > 0):
        raise SettingsError(f"lease is a number of seconds above 0, not {lease!r}.")
    losses = options.get("max_losses")
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, int) or losses < 1):
        raise SettingsError(f"max_losses is a number of runs, at least 1, not {losses!r}.")
    if options.get("on_lost", "requeue") not in ("requeue", "dead"):
        raise SettingsError(f"on_lost is 'requeue' or 'dead', not {options['on_lost']!r}.")
    kept = options.get("retention")
    seconds = kept.total_seconds() if isinstance(kept, timedelta) else kept
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0):
        raise SettingsError(f"retention is a timedelta or a number of seconds, not {kept!r}.")
    return dict(options)


def check_ordinary(task: Task, project: type[Task]) -> None:
    """Refuse the attributes of an ordinary task that are an option of ours with a slip in it, or one of jobs."""
    for name in sorted(given(type(task), project)):
        meant = _meant(name, OF_ORDINARY_TASKS)
        if meant is not None and meant != name:
            raise SettingsError(f"{name!r} is no option of a task ({task.name}). Did you mean {meant!r}?")
        if name in OWN_OPTIONS - OF_ORDINARY_TASKS - PLAIN_WORDS:
            raise SettingsError(
                f"{name!r} is no option of an ordinary task ({task.name}). If it is to make jobs, decorate it with "
                f"@sidejob_task({name}=...)."
            )


def given(cls: type[Task], project: type[Task]) -> dict[str, Any]:
    """Return what a task's author has given as its options: attributes above those of the project's own task class."""
    theirs = set(project.__mro__)
    return {
        name: value
        for above in reversed(cls.__mro__) if above not in theirs
        for name, value in vars(above).items() if not name.startswith("_") and not hasattr(value, "__get__")
    }  # fmt: skip


@cache  # each option of each task is looked at when its app is complete, and most have the same names
def _meant(name: str, ours: frozenset[str]) -> str | None:
    """Return which of our options a name is, or was meant to be; none of Celery's own is as close to one of ours."""
    near = difflib.get_close_matches(name.lower(), ours, 1, CLOSE)
    return near[0] if near else None

"""Our options of tasks: their checks, those of sidejob tasks before any app exists, and what `doctor` finds in them.

They tell which tasks are durable, and whether their lost runs are repeated.

Celery accepts any attribute on a task, so a misspelt option of ours would have no effect: it is found by its
similarity.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from celery import Celery
from celery.app.task import Task

from ..jobs.capacity import CapacityPool
from ..model import retention
from ..model.checks import MOST_S, SLIP, Form, is_number, is_seconds, misfit, nearest
from ..model.durable import ON_LOST
from ..model.errors import SettingsError
from ..model.finding import Finding, Level, check, warning, well
from ..model.logger import logger
from ..model.port import parse_ports
from ..model.printable import first_of
from ..model.queue import ON_RUN_RATE, RATE_FORM, parse_rate

_FLAG = ("True or False", lambda value: value in (True, False))
FORMS: Mapping[str, Form] = {
    "durable": _FLAG,
    "lease_renewal": ("'auto' or 'manual'", lambda value: value in ("auto", "manual")),
    "lease": (f"a number of seconds above 0, {MOST_S}", lambda value: is_seconds(value) and value > 0),
    "on_lost": ("'requeue' or 'dead'", lambda value: value in ON_LOST),
    "max_losses": ("a number of runs, at least 1", lambda value: is_number(value, least=1)),
    "run_rate": (RATE_FORM, lambda value: parse_rate(value) is not None),
    "on_run_rate": ("'delay' or 'terminate'", lambda value: value in ON_RUN_RATE),
    "publish_status": _FLAG,
    "retention": (retention.FORM, retention.is_retention),
    "capacity": ("a CapacityPool", lambda value: isinstance(value, CapacityPool)),
}
"""The values that each option may have; ports are parsed separately."""


OWN_OPTIONS = frozenset(FORMS).union(("inports", "outports"))

OF_ORDINARY_TASKS = frozenset({"durable", "on_lost", "max_losses", "capacity"})

PLAIN_WORDS = frozenset({"lease", "retention", "capacity"})
"""Options of ours that a project may use as attributes of its ordinary tasks, with another meaning."""


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse wrong options of a sidejob task, and return a copy of the others."""
    for name in sorted(options.keys() - OWN_OPTIONS):
        meant = _meant(name, OWN_OPTIONS)
        if meant is not None:
            raise SettingsError(f"{name!r} is no option of a sidejob task. Did you mean {meant!r}?")
    if "durable" in options:
        raise SettingsError(
            "The task option 'durable' is for ordinary tasks; a sidejob task makes jobs, which are durable as they "
            "are: leave it out."
        )
    parse_ports(options.get("inports", ()), where="inports")
    parse_ports(options.get("outports", ()), where="outports")
    wrong = misfit(options, FORMS)
    if wrong is not None:
        raise SettingsError(f"{wrong}.")
    if (options.get("lease_renewal") == "manual") != (options.get("lease") is not None):
        raise SettingsError('lease= is the deadline of a run with lease_renewal="manual": give both, or neither.')
    if options.get("on_run_rate") == "terminate" and options.get("run_rate") is None:
        raise SettingsError('on_run_rate="terminate" needs a rate: give run_rate= too, such as run_rate="600/m".')
    return dict(options)


def check_task(app: Celery, task: Task) -> None:
    """Refuse wrong options of an ordinary task, even before it was made a `DurableTask`.

    A capacity pool is refused for a task that has no rows, because its works could not be counted.
    """
    _check_names(task, app.Task)
    durable = is_durable(app, task.name)
    if not durable and isinstance(getattr(task, "capacity", None), CapacityPool):
        raise SettingsError(
            f"capacity= of {task.name} needs rows, and its messages have none: make it durable with durable=True or "
            "sidejob_durable_tasks, or decorate it with @sidejob_task."
        )
    if durable or getattr(task, "durable", None) is not None:
        wrong = misfit({name: getattr(task, name, None) for name in OF_ORDINARY_TASKS}, FORMS)
        if wrong is not None:
            raise SettingsError(f"{wrong} ({task.name}).")


def _check_names(task: Task, project: type[Task]) -> None:
    """Refuse attributes of an ordinary task that are a misspelt option of ours, or an option of jobs."""
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
    """Return the options that a task's author has given: attributes defined above the project's own task class."""
    theirs = set(project.__mro__)
    return {
        name: value
        for above in reversed(cls.__mro__)
        if above not in theirs
        for name, value in vars(above).items()
        if not name.startswith("_") and not hasattr(value, "__get__")
    }


@cache  # every option of every task is checked when its app is complete, and most have the same names
def _meant(name: str, ours: frozenset[str]) -> str | None:
    """Return the option of ours that a name is or was meant to be; no option of Celery is as similar to one of ours."""
    return nearest(name.lower(), ours, like=SLIP)


@check("durable tasks")
def findings(app: Celery) -> Iterator[Finding]:
    """Yield the findings about tasks whose modules are imported here; asks neither store nor broker.

    None of them is an error: a project may name its durable tasks for one deployment and not for another.
    """
    ordinary = sorted(task.name for task in app.tasks.values() if not getattr(task, "sidejob", False))
    durable = [name for name in ordinary if is_durable(app, name)]
    unused = [glob for glob in app.sidejob.durable_globs if not any(matches(name, glob) for name in app.tasks)]
    yield well(
        f"{len(durable)}{': ' if durable else ''}{first_of(durable)}"
        + (f"; no task known here matches {first_of(unused)}" if unused else ""),
    )
    idle = [name for name in ordinary if name not in durable and _means_to_be(app, name)]
    if idle:
        yield warning(
            f"not durable, though on_lost or max_losses is given: {first_of(idle)}",
            meaning="These options are for durable tasks. Messages of these may be lost, as of any Celery task.",
            remedy="Add durable=True or a pattern to sidejob_durable_tasks, or say durable=False where that is meant.",
        )
    late = [name for name in ordinary if getattr(app.tasks[name], "locks_late", None) is not None]
    if late:
        yield warning(
            f"locks_late is given, and has no effect any more: {first_of(late)}",
            meaning="It is not needed: a worker holds the rows of tasks that may be repeated when it fetches them.",
            remedy="Leave it out.",
        )


def warn(app: Celery) -> None:
    """Log the warnings that `doctor` would give; a worker does so when it starts."""
    for finding in findings(app):
        if finding.level != Level.OK:
            logger.warning("%s: %s. %s %s", finding.check, finding.found, finding.meaning, finding.remedy)


def _means_to_be(app: Celery, name: str) -> bool:
    task = app.tasks[name]
    return getattr(task, "durable", None) is None and bool(
        (OF_ORDINARY_TASKS - {"durable", "capacity"}) & given(type(task), app.Task).keys()
    )


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

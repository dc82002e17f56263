"""The checks of `doctor` in the app's own tasks: durable tasks, and options without effect."""

from __future__ import annotations

from collections.abc import Iterator

from celery import Celery

from ..model.finding import Finding, Level, warning, well
from ..model.logger import logger
from ..model.printable import first_of
from .durability import is_durable, matches
from .task_options import OF_ORDINARY_TASKS, given


def findings(app: Celery) -> Iterator[Finding]:
    """Yield the findings about tasks whose modules are imported here; asks neither store nor broker.

    None of them is an error: a project may name its durable tasks for one deployment and not for another.
    """
    ordinary = sorted(task.name for task in app.tasks.values() if not getattr(task, "sidejob", False))
    durable = [name for name in ordinary if is_durable(app, name)]
    unused = [glob for glob in app.sidejob.durable_globs if not any(matches(name, glob) for name in app.tasks)]
    yield well(
        "durable tasks",
        f"{len(durable)}{': ' if durable else ''}{first_of(durable)}"
        + (f"; no task known here matches {first_of(unused)}" if unused else ""),
    )
    idle = [name for name in ordinary if name not in durable and _means_to_be(app, name)]
    if idle:
        yield warning(
            "durable tasks",
            f"not durable, though on_lost or max_losses is given: {first_of(idle)}",
            meaning="These options are for durable tasks. Messages of these may be lost, as of any Celery task.",
            remedy="Add durable=True or a pattern to sidejob_durable_tasks, or say durable=False where that is meant.",
        )
    late = [name for name in ordinary if getattr(app.tasks[name], "locks_late", None) is not None]
    if late:
        yield warning(
            "durable tasks",
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

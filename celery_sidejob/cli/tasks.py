"""`tasks`: durable tasks that wait or run, and those that ended last."""

from __future__ import annotations

from typing import Any

import click

from ..inspection import Inspection
from . import names
from .command import answering
from .options import limit_option, task_filters
from .output import Output, duration, lasting, line, status

COLUMNS = ("Task id", "Status", "Task", "Queue", "Due", "Runs for")
FINISHED = ("Task id", "Status", "Task", "Queue", "Ended", "Took")


@click.command()
@task_filters
@click.option("--finished", is_flag=True, help="Those that ended last instead, if sidejob_task_history keeps some.")
@limit_option
@answering
def tasks(sidejob: Any, output: Output, /, finished: bool, limit: int, **chosen: Any) -> None:
    """List durable tasks that wait or run: first what runs, the longest first, then what was due first.

    A gated task waits for a slot of its capacity pool, or at the gate of its queue: the list says why. Tasks that have
    failed, expired or were revoked are in the dead set: `dead list`. The command reads all that wait or run, a million
    in some seconds.
    """
    which = {"task": chosen["task"], "queue": chosen["queue"]}
    inspection = Inspection(sidejob.runtime)
    if finished and chosen["statuses"]:
        raise click.UsageError("--status chooses among tasks that wait or run: leave out --finished.")
    with output.progress("Looking through the tasks"):
        found = (
            inspection.finished_tasks(limit=limit, **which) if finished
            else inspection.tasks(limit=limit, statuses=list(chosen["statuses"]) or None, **which)
        )  # fmt: skip
    more = "There may be more: --limit." if len(found) == limit else None
    output.answer_with_list(
        found, FINISHED if finished else COLUMNS, map(_ended if finished else _row, found), more=more
    )
    if not found and finished and not sidejob.settings.task_history:
        output.note("Nothing is kept of durable tasks that have ended: set sidejob_task_history to a number.")
    elif not found:
        names.hint(sidejob, output, **which)


def _row(task: dict[str, Any]) -> tuple[Any, ...]:
    shown = line(status(task["status"]), f": {task['waits_for']}" if task["waits_for"] else "")
    return task["task_id"], shown, task["task"], task["queue"], task["due_at"], duration(task["runs_s"])


def _ended(task: dict[str, Any]) -> tuple[Any, ...]:
    shown, took = status(task["status"]), lasting(task["lasted_s"])
    return task["task_id"], shown, task["task"], task["queue"], task["ended_at"], took

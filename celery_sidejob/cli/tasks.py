"""`tasks` and `revoke`: durable tasks that wait or run, tasks that ended last, and revocations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import click
from rich.text import Text

from ..hooks import control
from ..inspection.tasks import TaskViews
from ..model.printable import counted
from ..operations.ledger import burials
from ..operations.ledger.burials import Revoked
from .command import Failed, commands, hint_unknown, wait_for_none
from .options import check_one_way, limit_option, task_filters, yes_option
from .output import Output, duration, lasting, line, status
from .selection import PAGE, Summary, confirm_all

COLUMNS = ("Task id", "Status", "Task", "Queue", "Due", "Runs for")
FINISHED = ("Task id", "Status", "Task", "Queue", "Ended", "Took")


@commands.command()
@task_filters
@click.option("--finished", is_flag=True, help="Those that ended last instead, if sidejob_task_history keeps some.")
@limit_option
def tasks(sidejob: Any, output: Output, /, finished: bool, limit: int, **chosen: Any) -> None:
    """List durable tasks that wait or run: first what runs, the longest first, then what was due first.

    A gated task waits for a slot of its capacity pool, or at the gate of its queue: the list says why. Tasks that have
    failed, expired or were revoked are in the dead set: `dead list`. The command reads all that wait or run, a million
    in some seconds.
    """
    which = {"task": chosen["task"], "queue": chosen["queue"]}
    views = TaskViews(sidejob.runtime)
    if finished and chosen["statuses"]:
        raise click.UsageError("--status chooses among tasks that wait or run: leave out --finished.")
    with output.progress("Looking through the tasks"):
        found = (
            views.finished_tasks(limit=limit, **which)
            if finished
            else views.tasks(limit=limit, statuses=list(chosen["statuses"]) or None, **which)
        )
    more = "There may be more: --limit." if len(found) == limit else None
    output.answer_with_list(
        found, FINISHED if finished else COLUMNS, map(_ended if finished else _row, found), more=more
    )
    if not found and finished and not sidejob.settings.task_history:
        output.note("Nothing is kept of durable tasks that have ended: set sidejob_task_history to a number.")
    elif not found:
        hint_unknown(sidejob, output, **which)


def _row(task: dict[str, Any]) -> tuple[Any, ...]:
    shown = line(status(task["status"]), f": {task['waits_for']}" if task["waits_for"] else "")
    return task["task_id"], shown, task["task"], task["queue"], task["due_at"], duration(task["runs_s"])


def _ended(task: dict[str, Any]) -> tuple[Any, ...]:
    shown, took = status(task["status"]), lasting(task["lasted_s"])
    return task["task_id"], shown, task["task"], task["queue"], task["ended_at"], took


NOT_ENDED = (
    "runs, and was not ended: its worker has not heard of it, or its pool cannot stop it. It does not begin again."
)


@commands.command()
@click.argument("task_ids", metavar="[TASK_ID]...", nargs=-1)
@task_filters
@click.option("--terminate", is_flag=True, help="Also kill the processes in which the tasks run: for tasks that hang.")
@yes_option
def revoke(
    sidejob: Any, output: Output, /, task_ids: tuple[str, ...], terminate: bool, yes: bool, **chosen: Any
) -> None:
    """Revoke durable tasks: a waiting task does not run; a running task goes on, and does not begin again.

    With --terminate a running task is ended, too. The pools threads and solo cannot stop a body: with threads the task
    counts as ended, and the body goes on; a solo worker hears nothing while it runs one.

    Name the tasks by their ids, or choose them by --task, --queue and --status. If you choose them, the command first
    shows how many there are, and asks you. Tasks that are called meanwhile may be revoked too.

    The store keeps the revocation, and the command tells the workers, as Celery's own revoke does. The exit code is 1
    if a named task neither waits nor runs.
    """
    which = {**chosen, "statuses": list(chosen["statuses"]) or None}
    by_filters = any(value is not None for value in which.values())
    say = "Name tasks by their ids, or choose them by --task, --queue and --status."
    check_one_way(bool(task_ids), by_filters, say=say)
    if by_filters:
        _revoke_matching(sidejob, output, which, terminate, yes)
    else:
        _revoke_named(sidejob, output, task_ids, terminate)


def _revoke_named(sidejob: Any, output: Output, task_ids: Sequence[str], terminate: bool) -> None:
    found = burials.revoke_in_all(sidejob.runtime, task_ids)
    runs = _running(sidejob, task_ids) if terminate else found.running  # also tasks that were revoked before
    told = _told(sidejob, output, task_ids, found, terminate)
    left = runs
    if terminate and told and runs:
        left = wait_for_none(partial(_running, sidejob, runs), output)
    known = {*found.waiting, *found.running, *runs}
    unknown = [task_id for task_id in task_ids if task_id not in known]
    lines = [f"{task_id} does not run." for task_id in found.waiting]
    lines += [f"{task_id} was running, and is ended." for task_id in runs if task_id not in left]
    if not terminate:
        lines += [f"{task_id} runs; it goes on, and does not begin again. To end it: --terminate." for task_id in runs]
    document = {"waiting": found.waiting, "running": runs, "unknown": unknown}
    if terminate:
        document["ended"] = [task_id for task_id in runs if task_id not in left]
    output.answer(document, Text("\n").join(map(line, lines)) if lines else None)
    if terminate and left:
        raise Failed(" ".join(f"{task_id} {NOT_ENDED}" for task_id in left))
    if unknown:
        _check_stores(found)
        raise Failed(
            f"No durable task that waits or runs, and was not revoked before: {', '.join(unknown)}. A job is ended by "
            "`celery -A <app> sidejob terminate`."
        )


def _running(sidejob: Any, task_ids: Sequence[str]) -> list[str]:
    """Return which of these tasks run now."""
    views = TaskViews(sidejob.runtime)
    found = ((task_id, views.task(task_id)) for task_id in dict.fromkeys(task_ids))
    return [task_id for task_id, task in found if task is not None and task["status"] == "running"]


def _revoke_matching(sidejob: Any, output: Output, which: dict[str, Any], terminate: bool, yes: bool) -> None:
    views = TaskViews(sidejob.runtime)
    with output.progress("Counting the tasks"):
        counts = views.count_tasks(**which)
    confirm_all("Revoke", counts, ("task", "tasks"), yes=yes)
    summary, running = Summary(), 0

    def revoke_all() -> None:
        nonlocal running
        told = True
        for ids in views.task_ids(page=PAGE, **which):
            found = burials.revoke_in_all(sidejob.runtime, ids)
            number = len(found.waiting) + len(found.running)
            summary.add(number)
            running += len(found.running)
            told = told and _told(sidejob, output, ids, found, terminate)  # an unreachable broker is asked only once
            _check_stores(found)
            summary.skip("ended meanwhile", len(ids) - number)

    summary.work(output, "Revoking tasks", revoke_all)
    what = "whose workers were told to end them" if terminate else "which go on and do not begin again"
    goes_on = f" Running tasks, {what}: {running}." if running else ""
    said = f"Revoked: {counted(summary.done, 'task', 'tasks')}.{goes_on}{summary.skips}"
    output.answer(
        {"matched": counts.total(), "done": summary.done, "running": running, "skipped": dict(summary.skipped)},
        said if counts else "No task matches.",
    )
    if not counts:
        hint_unknown(sidejob, output, task=which["task"], queue=which["queue"])
    summary.end(output)


def _told(sidejob: Any, output: Output, task_ids: Sequence[str], found: Revoked, terminate: bool) -> bool:
    """Tell the workers of a revocation; print a note if they cannot be told."""
    try:
        sidejob.app.control.tell_of_revocation(task_ids, terminate=terminate)
    except Exception as error:  # a transport may raise anything
        kept = "It is kept, but" if found.waiting or found.running else "Nothing is kept, and"
        output.note(f"{kept} the workers could not be told: {type(error).__name__}: {error}")
        return False
    return True


def _check_stores(found: Revoked) -> None:
    """Fail if a store that may have one of the tasks has not stored its revocation."""
    if found.unavailable is not None:
        raise Failed(control.NOT_KEPT.format(error=found.unavailable))
    if found.unfit is not None:
        raise Failed(control.NOT_KEPT_THERE.format(error=found.unfit))

"""`revoke`: durable tasks that wait or run; and what `show` prints of such a task."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from ..hooks import control
from ..operations import revocation
from .command import Failed, answering
from .output import Output, facts, printable, status


def show_task(output: Output, task: dict[str, Any]) -> None:
    """Show a durable task that is not finished."""
    head = Text.assemble((f"Task {printable(task['task_id'])}", "bold"), f"  {printable(task['task'])}  ")
    shown = facts(
        {
            "queue": task["queue"],
            "store": task["store"],
            "unique key": task["unique"],
            "arguments": " ".join(part for part in (task["args"], task["kwargs"]) if part) or None,
            "due": task["due_at"],
            "expires": task["expires_at"],
            "published": task["published_at"] or (None if task["worker"] else "not yet"),
            "running since": task["running_since"],
            "in": task["worker"] or ("a lost worker" if task["running_since"] else None),
            "retries": task["retries"] or None,
            "losses": task["losses"] or None,
            "last loss": task["last_loss"] and task["last_loss"]["why"],
            "revoked": "yes: it does not begin again" if task["revoked"] else None,
        }
    )
    output.answer(task, head + status(task["status"]), shown)


@click.command()
@click.argument("task_ids", metavar="TASK_ID...", nargs=-1, required=True)
@answering
def revoke(sidejob: Any, output: Output, task_ids: tuple[str, ...]) -> None:
    """Revoke durable tasks: a waiting task does not run; a running one goes on and does not begin again.

    The store keeps the revocation, and the workers are told of it, as by Celery. Ends with 1 if one of the tasks
    neither waits nor runs.
    """
    found = revocation.revoke_in_all(sidejob.runtime, task_ids)
    try:
        sidejob.app.control.tell_of_revocation(task_ids)
    except Exception as error:  # whatever a transport raises
        kept = "It is kept, but" if found.waiting or found.running else "Nothing is kept, and"
        output.note(f"{kept} the workers could not be told: {type(error).__name__}: {error}")
    unknown = [task_id for task_id in task_ids if task_id not in (*found.waiting, *found.running)]
    lines = [f"{printable(task_id)} does not run." for task_id in found.waiting]
    lines += [f"{printable(task_id)} runs; it goes on, and does not begin again." for task_id in found.running]
    document = {"waiting": found.waiting, "running": found.running, "unknown": unknown}
    output.answer(document, Text("\n".join(lines)) if lines else None)
    if unknown and found.unavailable is not None:
        raise Failed(control.NOT_KEPT.format(error=found.unavailable))
    if unknown and found.unfit is not None:
        raise Failed(control.NOT_KEPT_THERE.format(error=found.unfit))
    if unknown:
        raise Failed(
            f"No durable task that waits or runs, and was not revoked before: {', '.join(unknown)}. A job is ended by "
            "`celery -A <app> sidejob terminate`."
        )

"""`show`: everything about one job, or about a durable task that waits, runs or is in the dead set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..inspection.jobs import JobViews
from ..inspection.tasks import TaskViews
from ..model.columns import SHOWN
from ..model.errors import JobNotFoundError
from ..model.status import FINISHED, Status
from ..model.steps import label
from .command import commands
from .dead import show_entry
from .jobs import parent_of
from .output import Output, at_least, facts, line, moment, printable, shortened, status, table_if_any

NEWEST = 20
"""The most entries of its history that are shown with a job; --json shows all."""
NOTHING = (
    "There is no job {which!r}: it was deleted, or never committed. Nor is there a durable task of this id that waits, "
    "runs or is in the dead set: it has ended well, or its entry was deleted."
)


@commands.command()
@click.argument("which", metavar="ID_OR_ALIAS_OR_TASK_ID")
@click.option(
    "--history", "everything", is_flag=True, help=f"Show a job's whole history, not its last {NEWEST} entries."
)
@click.option("--steps", "with_steps", is_flag=True, help="Show a job's steps, since it completed last.")
def show(sidejob: Any, output: Output, which: str, everything: bool, with_steps: bool) -> None:
    """Show everything about one job, by its id, an alias or a task id, or about a durable task by its task id.

    A durable task is shown while it waits or runs, and while it is in the dead set.
    """
    job = sidejob.find(which)
    task = TaskViews(sidejob.runtime).task(which) if job is None else None
    if task is not None:
        _show_task(output, task)
        return
    job = job or sidejob.for_task_id(which)
    if job is None:
        entry = sidejob.dead.for_task_id(which)
        if entry is None:
            raise JobNotFoundError(NOTHING.format(which=which))
        show_entry(output, entry)
        return
    details = JobViews(sidejob.runtime).details(job)
    if with_steps:
        details["steps"] = [asdict(step) for step in job.steps]
    head = line((f"Job {details['id']}", "bold"), f"  {details['task']}  ")
    sections = (
        _facts(details),
        _state(details),
        _ports(details),
        _room(details),
        _children(details),
        _steps(details.get("steps", ())),
        _history(details["history"], everything),
        *_trouble(details),
    )
    output.answer(details, head + status(details["status"]), *sections)


def _show_task(output: Output, task: dict[str, Any]) -> None:
    """Show a durable task that is not finished."""
    head = line((f"Task {task['task_id']}", "bold"), f"  {task['task']}  ")
    shown = facts(
        {
            "queue": task["queue"],
            "store": task["store"],
            "unique key": task["unique"],
            "arguments": " ".join(part for part in (task["args"], task["kwargs"]) if part) or None,
            "waits for": task["waits_for"],
            "due": task["due_at"],
            "declined": task["declined_at"] and f"by all workers since {moment(task['declined_at'])}",
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


def _facts(details: dict[str, Any]) -> RenderableType:
    message = details["message"]
    return facts(
        {
            "queue": _queue(details),
            "priority": details["priority"],
            "arguments": shortened(details["args"]),
            "keywords": shortened(details["kwargs"]) if details["kwargs"] else None,
            "parent": parent_of(details),
            "aliases": ", ".join(map(str, details["aliases"])),
            "tags": ", ".join(map(str, details["tags"])),
            "tracked": "yes" if details["tracked"] else None,
            "created": details["created_at"],
            **{key.replace("_", " "): details[key] for key, column in SHOWN.items() if column.check is not None},
            "last run": details["ran_at"],
            "result": None if details["result"] is None else shortened(details["result"]),
            "ended": details["ended_at"] if details["status"] in FINISHED else None,
            "task id": details["task_id"],
            "unique key": details["unique"],
            "runs begun": details["run_no"],
            "asked again": "yes, since this run began" if details["asked_again"] and details["in_run"] else None,
            "losses": details["losses"] or None,
            "retries": details["retries"] or None,
            "message": message and _message(message),
            "progress": details["progress"] and details["progress"]["shown"],
            "waiting for": ", ".join(details["waiting_for"]) or None,
            "depends on": ", ".join(map(str, details["dependencies"])) or None,
            "dependents": ", ".join(map(str, details["dependents"])) or None,
            "timers": _timers(details),
        }
    )


def _queue(details: dict[str, Any]) -> str:
    """Return the job's queue, and whether no worker is there to begin an owed run."""
    waits = details["status"] in (Status.QUEUED, Status.TERMINATING) and not details["in_run"]
    nobody = waits and details["queue_served"] is False
    return f"{details['queue']}: no live worker serves it" if nobody else details["queue"]


def _timers(details: dict[str, Any]) -> str | None:
    """List the timers of a job; they make it run again even if it has completed in the meantime."""
    shown = ", ".join(f"{timer['ask']} at {moment(timer['due_at'])}" for timer in details["timers"])
    return f"{shown}: it runs then, although it is completed" if shown and details["status"] == "completed" else shown


def _message(message: dict[str, Any]) -> str:
    """Describe where the message of the current or next run is."""
    run = f"for run {message['for_run']}"
    if message["locked_at"] is not None:
        return f"{run}: running since {moment(message['locked_at'])} in {message['locked_by'] or 'a lost worker'}"
    published = message["published_at"]
    where = "not published yet" if published is None else f"published {moment(published)}"
    if message["is_parked"]:
        return f"{run}: parked until a worker of the queue knows the task"
    if message["due_at"] is None:
        return f"{run}: its time does not count yet"
    return f"{run}: due {moment(message['due_at'])}, {where}"


def _state(details: dict[str, Any]) -> RenderableType | None:
    state = details["state"]  # a mapping, or the result of `sidejob_redact`
    rows = [(key, shortened(value)) for key, value in (state if isinstance(state, dict) else {"": state}).items()]
    return table_if_any("Key", "Value", title="State", rows=rows)


def _ports(details: dict[str, Any]) -> RenderableType | None:
    rows = [
        (
            direction,
            name,
            at_least(port["packets"], port["more_packets"]),
            shortened(port["default"]) if "default" in port else None,
            ", ".join(port["channels"]),
        )
        for direction in ("in", "out")
        for name, port in details[f"{direction}ports"].items()
    ]
    return table_if_any("", "Port", "Packets", "Default", "Channels", title="Ports", rows=rows)


def _room(details: dict[str, Any]) -> RenderableType | None:
    rows = [
        (
            row["waiter_id"],
            f"{row['direction']} {row['port']} of {row['job_id']}",
            row["needs"],
            row["packets"],
            row["limit"],
        )
        for row in details["waiting_for_room"]
    ]
    return table_if_any("Job", "Waits for room on", "Needs", "Packets", "Limit", title="Waiting for room", rows=rows)


def _history(entries: list[dict[str, Any]], everything: bool) -> RenderableType | None:
    shown = entries if everything else entries[-NEWEST:]
    rows = [(entry["at"], entry["what"], entry["run_no"], entry["worker"], _detail(entry["detail"])) for entry in shown]
    left_out = f" (the last {len(shown)} of {len(entries)} entries: --history)" if len(shown) < len(entries) else ""
    return table_if_any("At", "What", "Run", "Worker", "", title=f"History{left_out}", rows=rows)


def _detail(detail: Any) -> Any:
    """Return the detail of an entry as text: for a loss its sentence, for steps their names, otherwise JSON."""
    match detail:
        case {"why": why}:
            return why
        case {"count": count, "steps": [*steps]} if all(_is_named(step) for step in steps):
            return f"{count}: {', '.join(label(step['name'], step['number']) for step in steps)}"
        case _:
            return shortened(detail) if detail else None


def _is_named(step: Any) -> bool:
    return isinstance(step, dict) and {"name", "number"} <= step.keys()


def _steps(steps: Sequence[dict[str, Any]]) -> RenderableType | None:
    rows = [
        (
            label(step["name"], step["number"]),
            step["kind"],
            step["began_at"],
            step["tries"],
            f"{step['took_s']:.3g} s",
            step["worker"],
            _outcome(step),
        )
        for step in steps
    ]
    return table_if_any("Step", "", "Began", "Tries", "Took", "Worker", "Value", title="Steps", rows=rows)


def _outcome(step: dict[str, Any]) -> Any:
    """Return the value of a step, its last error, or its remaining wait, as text."""
    if step["error"] is not None:
        error = f"{step['error']['type']}: {step['error']['message']}"
        return error if step["done"] else f"tried again at {moment(step['due_at'])} after {error}"
    if step["done"]:
        return shortened(step["value"])
    return "waits" if step["due_at"] is None else f"waits until {moment(step['due_at'])}"


def _children(details: dict[str, Any]) -> RenderableType | None:
    children, count = details["children"], details["children_count"]
    rows = [(name, child["id"], status(child["status"]), child["task"]) for name, child in children.items()]
    total = at_least(count, details["more_children"])
    title = f"Children ({total})" if count == len(rows) else f"Children (the first {len(rows)} of {total})"
    return table_if_any("Name", "Job", "Status", "Task", title=title, rows=rows)


def _trouble(details: dict[str, Any]) -> list[RenderableType]:
    dead, error = details["dead"] or {}, details["error"] or {}
    shown: list[RenderableType] = []
    if dead:
        found = {
            "reason": dead["reason"],
            "since": dead["died_at"],
            "retries": dead["retries"] or None,
            "error": dead["error"],
        }
        shown += [Text(f"Entry {dead['id']} of the dead set", style="bold red"), facts(found)]
    elif error:
        shown.append(line((f"Error of the last run: {error['type']}: {error['message']}", "red")))
    traceback = dead.get("traceback") or error.get("traceback")
    if traceback:
        shown.append(Text(printable(str(traceback), keep="\n\t").rstrip(), style="bright_black"))
    return shown

"""`jobs`, `show`, `run`, `terminate`: what one does with jobs."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType
from rich.text import Text

from ..inspection import Inspection
from ..job import Job
from ..model.status import Status
from .command import Failed, as_json, job_argument, largest_id, with_sidejob
from .output import Output, facts, printable, shortened, status, table

LONGEST_WAIT_S = 1e9


@click.command()
@click.option(
    "--status", "statuses", type=click.Choice([str(one) for one in Status]), multiple=True,
    help="Only those with this status; may be repeated.",
)  # fmt: skip
@click.option("--task", metavar="NAME", help="Only those of this task.")
@click.option("--queue", metavar="NAME", help="Only those of this queue.")
@click.option("--parent", metavar="ID_OR_ALIAS", help="Only the children of this job.")
@click.option("--limit", type=click.IntRange(1, largest_id), default=100, show_default=True, help="At most so many.")
@click.option("--after", metavar="ID", type=click.IntRange(0, largest_id), default=0, help="Only those after this id.")
@as_json
@with_sidejob
def jobs(
    sidejob: Any, output: Output, statuses: tuple[str, ...], task: str | None, queue: str | None, parent: str | None,
    limit: int, after: int, as_json: bool,
) -> None:  # fmt: skip
    """List jobs by their ids, oldest first."""
    found: list[Job] = sidejob.jobs(
        status=statuses or None, task=task, queue=queue, parent=parent, limit=limit, after=after
    )
    inspection = Inspection(sidejob.runtime)
    if as_json:
        output.json([inspection.info(job) for job in found])
        return
    rows = [
        (job.id, status(job.status), job.task, job.queue, _parent(job.info), job.created_at, job.ran_at)
        for job in found
    ]
    output.show(table("Job", "Status", "Task", "Queue", "Parent", "Created", "Last run", rows=rows))
    if len(found) == limit:
        output.note(f"There may be more: --after {found[-1].id}")


@click.command()
@job_argument
@as_json
@with_sidejob
def show(sidejob: Any, output: Output, job_id: str, as_json: bool) -> None:
    """Show everything about one job."""
    details = Inspection(sidejob.runtime).details(sidejob.get(job_id))
    if as_json:
        output.json(details)
    else:
        output.show(*_sections(details))


@click.command()
@job_argument
@click.option("--force", is_flag=True, help="Also if it is failed, terminating or terminated; cuts a backoff short.")
@click.option("--parent", is_flag=True, help="Ask its parent instead.")
@click.option("--countdown", metavar="SECONDS", type=click.FloatRange(0, LONGEST_WAIT_S), help="Run it so much later.")
@as_json
@with_sidejob
def run(
    sidejob: Any, output: Output, job_id: str, force: bool, parent: bool, countdown: float | None, as_json: bool
) -> None:
    """Ask that a job run at least once from its beginning, from now on."""
    job: Job = sidejob.get(job_id)
    asked = job.run(force=force, parent=parent, countdown=countdown)
    if asked is None:
        reason, refused = _refusal(job, parent)
        if as_json:
            output.json({"job": refused and refused.id, "asked": False, "status": refused and refused.status,
                         "reason": reason})  # fmt: skip
        raise Failed(reason)
    if as_json:
        output.json({"job": asked.id, "asked": True, "status": asked.status})
    else:
        when = f" in {countdown:g} s" if countdown else ""
        output.show(Text.assemble(f"Asked job {asked.id} ({printable(asked.task)}) to run{when}; it is ",
                                  status(asked.status), "."))  # fmt: skip


@click.command()
@job_argument
@click.option("--recursive", is_flag=True, help="With everything below it.")
@as_json
@with_sidejob
def terminate(sidejob: Any, output: Output, job_id: str, recursive: bool, as_json: bool) -> None:
    """Ask for a job's shutdown; a run in progress finishes first."""
    job = sidejob.get(job_id).terminate(recursive=recursive)
    if as_json:
        output.json({"job": job.id, "status": job.status, "recursive": recursive})
    else:
        what = f"Job {job.id} ({printable(job.task)})" + (" and everything below it" if recursive else "")
        output.show(Text.assemble(f"Asked for the shutdown of {what}; the job is ", status(job.status), "."))


def _refusal(job: Job, parent: bool) -> tuple[str, Job | None]:
    """Say why nothing was asked, and of which job."""
    refused = job.refresh().parent if parent else job.refresh()
    if refused is None:
        return f"Job {job.id} has no parent that could be asked; nothing was.", None
    return f"Job {refused.id} was not asked to run: it is {refused.status}. Force it with --force.", refused


def _parent(info: dict[str, Any]) -> str:
    return "" if info["parent"] is None else f"{info['parent']} / {info['child_name']}"


def _sections(details: dict[str, Any]) -> list[RenderableType]:
    """Return what is shown of a job, section by section; empty ones are left out."""
    return [
        Text.assemble((f"Job {details['id']}", "bold"), f"  {printable(details['task'])}  ",
                      status(details["status"])),
        _facts(details),
        *_tables(details),
        *_troubles(details),
    ]  # fmt: skip


def _facts(details: dict[str, Any]) -> RenderableType:
    message = details["message"]
    return facts(
        {
            "queue": details["queue"],
            "priority": details["priority"],
            "arguments": shortened(details["args"]),
            "keywords": shortened(details["kwargs"]) if details["kwargs"] else None,
            "parent": _parent(details),
            "aliases": ", ".join(details["aliases"]),
            "created": details["created_at"],
            "created by": details["created_by"],
            "last run": details["ran_at"],
            "ended": details["ended_at"],
            "task id": details["task_id"],
            "runs begun": details["run_no"],
            "asked again": "yes, during the present run" if details["asked_again"] and details["in_run"] else None,
            "losses": details["losses"] or None,
            "retries": details["retries"] or None,
            "message": message and _doorbell(message),
            "timers": ", ".join(f"{timer['ask']} at {timer['due_at'].astimezone():%Y-%m-%d %H:%M:%S %z}"
                                for timer in details["timers"]),
        }
    )  # fmt: skip


def _doorbell(message: dict[str, Any]) -> str:
    """Say where the message of the present or next run is."""
    run = f"for run {message['for_run']}"
    if message["locked_at"] is not None:
        return f"{run}: running since {_moment(message['locked_at'])} in {message['locked_by'] or 'a lost worker'}"
    due = f"{run}: due {_moment(message['due_at'])}, "
    published = message["published_at"]
    return due + (f"published {_moment(published)}" if published is not None else "not published yet")


def _moment(at: Any) -> str:
    return str(at.astimezone().isoformat(" ", "seconds"))


def _tables(details: dict[str, Any]) -> list[RenderableType]:
    shown: list[RenderableType] = []
    if details["state"]:
        rows = [(key, shortened(value)) for key, value in details["state"].items()]
        shown.append(table("Key", "Value", title="State", rows=rows))
    ports = [
        (direction, name, port["packets"], shortened(port["default"]) if "default" in port else None,
         ", ".join(port["channels"]))
        for direction in ("inports", "outports")
        for name, port in details[direction].items()
    ]  # fmt: skip
    if ports:
        rows = [(direction.removesuffix("ports"), *port) for direction, *port in ports]
        shown.append(table("", "Port", "Packets", "Default", "Channels", title="Ports", rows=rows))
    children = details["children"]
    if children:
        left_out = details["children_count"] - len(children)
        title = f"Children ({details['children_count']}" + (f", the first {len(children)})" if left_out > 0 else ")")
        rows = [(name, child["id"], status(child["status"]), child["task"]) for name, child in children.items()]
        shown.append(table("Name", "Job", "Status", "Task", title=title, rows=rows))
    return shown


def _troubles(details: dict[str, Any]) -> list[RenderableType]:
    dead, error = details["dead"], details["error"]
    shown: list[RenderableType] = []
    if dead is not None:
        shown.append(Text(""))
        shown.append(Text(f"In the dead set as entry {dead['id']}", style="bold red"))
        shown.append(facts({"reason": dead["reason"], "since": dead["died_at"], "retries": dead["retries"] or None,
                            "error": dead["error"]}))  # fmt: skip
    elif error is not None:
        shown.append(Text(""))
        shown.append(Text(f"Error of the last run: {printable(error['type'])}: {printable(str(error['message']))}",
                          style="red"))  # fmt: skip
    traceback = (dead or {}).get("traceback") or (error or {}).get("traceback")
    if traceback:
        shown.append(Text(printable(str(traceback), keep="\n\t").rstrip(), style="bright_black"))
    return shown

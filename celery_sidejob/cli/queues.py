"""`queues`, `pause`, `resume`, `unmanage` and `workers`: the managed queues with their gates, and the live workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from rich.text import Text

from ..inspection.queues import QueueViews
from ..jobs.queue import Queue
from ..jobs.workers import WorkerInfo, WorkerRun, document_of
from ..store.statement import picked
from .command import commands, hint_unknown, unknown_name
from .output import Output, duration, job_or_task, line, paused, table_if_any

LIMITS = ("limit", "limit_per_key", "rate")


@commands.command()
def queues(sidejob: Any, output: Output) -> None:
    """Show the managed queues: their limits, and how many runs wait and run there."""
    gates = QueueViews(sidejob.runtime).gates()
    found = [{**gate, "counts": asdict(sidejob.queue(gate["name"]).counts)} for gate in gates]
    rows = [
        (about["name"], paused(about["paused_at"], about["reason"]), *map(about.get, LIMITS), *about["counts"].values())
        for about in found
    ]
    shown = table_if_any(
        "Queue", "", "Limit", "Per key", "Rate", "Waiting", "Running", "Scheduled", "Blocked", "Lost", rows=rows
    )
    output.answer(found, shown or "No queue is managed: declare one in sidejob_queues, or pause one.")


@commands.command()
@click.argument("queue")
@click.option("--reason", metavar="TEXT", help="Why it is paused; `queues` and `doctor` show this text.")
def pause(sidejob: Any, output: Output, queue: str, reason: str | None) -> None:
    """Begin no further run of a queue, on any worker, until `resume`; runs in progress go on."""
    stopped = sidejob.queue(queue)
    said = unknown_name(sidejob, output, "queue", queue)  # asked before, because a paused queue is known
    stopped.pause(reason)
    output.answer(_about(stopped), f"Queue {queue} is paused. Runs in progress: {stopped.counts.running}.")
    if said:
        output.note(said)


@commands.command()
@click.argument("queue")
def resume(sidejob: Any, output: Output, queue: str) -> None:
    """Let runs of a queue begin again."""
    resumed = sidejob.queue(queue)
    was_paused = resumed.paused
    resumed.resume()
    said = "goes on" if was_paused else "was not paused"
    output.answer(_about(resumed), f"Queue {queue} {said}. Waiting: {resumed.counts.waiting}.")
    if not was_paused:
        hint_unknown(sidejob, output, queue=queue)


@commands.command()
@click.argument("queue")
def unmanage(sidejob: Any, output: Output, queue: str) -> None:
    """Stop managing a queue: remove its pause, limits and order, and begin the runs that wait at its gate."""
    managed = sidejob.queue(queue)
    about = _about(managed)
    was_managed = managed.unmanage()
    had = [f"{name.replace('_', ' ')} {about[name]}" for name in LIMITS if about[name]]
    was = f" It had {', '.join(had)}." if had else ""
    said = "is not managed any more" if was_managed else "was not managed"
    output.answer({"name": queue, "was_managed": was_managed}, f"Queue {queue} {said}.{was}")
    if not was_managed:
        hint_unknown(sidejob, output, queue=queue)


def _about(queue: Queue) -> dict[str, Any]:
    """Return the settings of a queue as `QueueViews.gates` does, also if it is not managed, and its counts."""
    paused = {"name": queue.name, "paused_at": queue.paused_at, "reason": queue.pause_reason}
    return {**paused, **picked(queue, "ordered", *LIMITS), "counts": asdict(queue.counts)}


@commands.command()
def workers(sidejob: Any, output: Output) -> None:
    """List the live workers: when each began and was last heard, its queues, and what it runs now, for how long."""
    found: list[WorkerInfo] = sidejob.workers()
    rows = [
        (one.name, one.started_at, one.heard_at, ", ".join(one.queues), Text("\n").join(map(_shown, one.runs)))
        for one in found
    ]
    shown = table_if_any("Worker", "Since", "Heard", "Queues", "Runs", rows=rows)
    output.answer([document_of(one, runs="running") for one in found], shown or "No worker is alive.")


def _shown(run: WorkerRun) -> Text:
    return line(f"{job_or_task(run.of)} {run.task}, {duration(run.lasts_s)}")

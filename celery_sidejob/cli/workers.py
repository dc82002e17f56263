"""`workers`: who is there, and what each runs."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from ..jobs.job import Job
from ..jobs.workers import WorkerInfo, WorkerRun
from .command import answering
from .output import Output, duration, job_or_task, line, table_if_any


@click.command()
@answering
def workers(sidejob: Any, output: Output) -> None:
    """List the live workers: when each began and was last heard, its queues, and what it runs now, for how long."""
    found: list[WorkerInfo] = sidejob.workers()
    rows = [
        (one.name, one.started_at, one.heard_at, ", ".join(one.queues), Text("\n").join(map(_shown, one.runs)))
        for one in found
    ]
    shown = table_if_any("Worker", "Since", "Heard", "Queues", "Runs", rows=rows)
    documents = [
        {"name": one.name, "started_at": one.started_at, "heard_at": one.heard_at, "queues": one.queues,
         "running": _running(one)}
        for one in found
    ]  # fmt: skip
    output.answer(documents, shown or "No worker is alive.")


def _shown(run: WorkerRun) -> Text:
    return line(f"{job_or_task(run.of)} {run.task}, {duration(run.lasts_s)}")


def _running(worker: WorkerInfo) -> list[dict[str, Any]]:
    return [
        {"job": run.of.id if isinstance(run.of, Job) else None,
         "task_id": None if isinstance(run.of, Job) else str(run.of.id),
         "task": run.task, "began_at": run.began_at, "lasts_s": run.lasts_s}
        for run in worker.runs
    ]  # fmt: skip

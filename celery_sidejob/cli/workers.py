"""`workers`: who is there, and what each runs."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from ..jobs.job import Job
from ..jobs.workers import WorkerInfo
from .command import answering
from .output import Output, job_or_task, table_if_any


@click.command()
@answering
def workers(sidejob: Any, output: Output) -> None:
    """List the live workers: when each began, when it was last heard, its queues, and what it runs now."""
    found: list[WorkerInfo] = sidejob.workers()
    rows = [
        (one.name, one.started_at, one.heard_at, ", ".join(one.queues), ", ".join(map(job_or_task, one.running)))
        for one in found
    ]
    shown = table_if_any("Worker", "Since", "Heard", "Queues", "Runs", rows=rows)
    documents = [
        {"name": one.name, "started_at": one.started_at, "heard_at": one.heard_at, "queues": one.queues,
         "running": _running(one)}
        for one in found
    ]  # fmt: skip
    output.answer(documents, shown or Text("No worker is alive."))


def _running(worker: WorkerInfo) -> list[dict[str, Any]]:
    return [
        {"job": one.id if isinstance(one, Job) else None, "task_id": None if isinstance(one, Job) else str(one.id)}
        for one in worker.running
    ]

"""The live workers, and the runs of each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..operations.runtime import Runtime
from ..store import workers
from .job import Job


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that is there: it was not declared dead, and has not stopped."""

    name: str
    """Its host, its process and a part drawn at its start: no other worker has or had this name."""
    started_at: datetime
    heard_at: datetime
    """When it last reported that it is alive."""
    queues: list[str]
    running: list[Any]
    """What it runs now, the oldest first, up to 1,000: a `Job`, or the Celery result of a durable task."""


def present(runtime: Runtime) -> list[WorkerInfo]:
    """Return the workers that are there, in the order of their start."""
    rows = workers.present(runtime.connections)
    running: dict[int, list[Any]] = {}
    for row in workers.running(runtime.connections, [row.id for row in rows]):
        is_job = row.job_id is not None
        found = Job(row.job_id, runtime=runtime) if is_job else runtime.tasks.result(row.task_id)
        running.setdefault(row.worker_id, []).append(found)
    return [
        WorkerInfo(row.ident, row.started_at, row.beat_at, sorted(row.queues), running.get(row.id, [])) for row in rows
    ]

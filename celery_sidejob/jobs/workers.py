"""The live workers, the runs of each, and the sidejob tasks that workers serve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..model.changes import Change, Publish
from ..model.errors import InvalidChannelError
from ..model.names import channel_of_workers, check_channel
from ..operations.changes.unit_of_work import carry_out
from ..operations.runtime import Runtime
from ..store import registry, workers
from ..store.statement import picked
from .job import Job
from .log_entries import UNLOGGED


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """A run that a worker has begun."""

    of: Any
    """A `Job`, or the Celery result of a durable task."""
    task: str
    began_at: datetime
    lasts_s: float
    """The seconds since it began, by the store's clock."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that is present: it was not declared dead, and has not stopped."""

    name: str
    """Its host, its process and a random part: no other worker has or had this name."""
    started_at: datetime
    heard_at: datetime
    """When it last reported that it is alive."""
    queues: list[str]
    runs: list[WorkerRun]
    """The runs in progress there, the oldest first, up to 1,000."""

    @property
    def running(self) -> list[Any]:
        """The jobs, and the Celery results of durable tasks, that are running there."""
        return [run.of for run in self.runs]


def present(runtime: Runtime) -> list[WorkerInfo]:
    """Return the workers that are present, in the order of their start."""
    rows = workers.present(runtime.connections)
    runs: dict[int, list[WorkerRun]] = {}
    for row in workers.running(runtime.connections, [row.id for row in rows]):
        is_job = row.job_id is not None
        found = Job(row.job_id, runtime=runtime) if is_job else runtime.tasks.result(row.task_id)
        run = WorkerRun(found, row.task, row.began_at, row.lasts_s)
        runs.setdefault(row.worker_id, []).append(run)
    return [
        WorkerInfo(row.ident, row.started_at, row.beat_at, sorted(row.queues), runs.get(row.id, [])) for row in rows
    ]


def document_of(worker: WorkerInfo, *, runs: str) -> dict[str, Any]:
    """Return a worker as JSON values, but for the times; `runs` is the key of its runs."""
    return {
        **picked(worker, "name", "started_at", "heard_at", "queues"),
        runs: [
            {
                "job": run.of.id if isinstance(run.of, Job) else None,
                "task_id": None if isinstance(run.of, Job) else str(run.of.id),
                **picked(run, "task", "began_at", "lasts_s"),
            }
            for run in worker.runs
        ],
    }


def register(runtime: Runtime, served: Sequence[Mapping[str, str]]) -> None:
    """Record the tasks that a worker serves, for clients that do not have their code; publish each changed registry.

    If the process dies before the publication, the change is not published.
    """
    connections = runtime.connections
    changed = connections.transact("register", lambda executor: registry.register(executor, map(dict, served)))
    published: list[Change] = []
    for queue in changed:
        tasks: dict[str, Any] = {
            task: json.loads(text) for task, text in registry.registered_in(connections, queue).items()
        }
        try:
            name = check_channel(channel_of_workers(queue))
        except InvalidChannelError:  # some names of queues are not allowed for channels
            continue
        published.append(Publish(name, json.dumps(tasks), options=UNLOGGED))
    if published:
        carry_out(runtime, "register", published)

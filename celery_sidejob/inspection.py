"""Read-only views for commands and dashboards. The running side never imports this.

What comes from here is fit to be shown: arguments, errors and tracebacks went through `sidejob_redact`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .job import Job
from .model import values
from .model.errors import JobNotFoundError
from .operations.runtime import Runtime
from .store import aliases, asks, dead, jobs, messages, packets, ports, state, workers
from .store.statement import Executor

CHILDREN = 100
"""How many children and timers of a job are shown with it; `tree` and `jobs` page through more."""


@dataclass(frozen=True, slots=True)
class Node:
    """A job as a tree shows it."""

    id: int
    parent: int | None
    child_name: str | None
    task: str
    status: str
    depth: int
    children: int
    """How many children it has, also those that are not shown."""


class Inspection:
    """Looks at one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def info(self, job: Job) -> dict[str, Any]:
        """Return `job.info`, redacted."""
        info = job.info
        error = info["error"]
        return {
            **info,
            "args": self._redacted(info["args"]),
            "kwargs": self._redacted(info["kwargs"]),
            "error": error and {
                **error,
                "message": self._redacted(error["message"]),
                "traceback": error["traceback"] and self._redacted(error["traceback"]),
            },
        }  # fmt: skip

    def details(self, job: Job) -> dict[str, Any]:
        """Return everything about a job that a person may want to see.

        That is `info` and its aliases, state, ports with the number of packets that wait, the first `CHILDREN`
        children and how many there are, the message of its present or next run, timers, and its dead entry.
        """

        def work(executor: Executor) -> dict[str, Any]:
            return self._details(executor, job.id)

        return self._runtime.connections.transact("inspect", work)

    def tree(self, job: Job, *, depth: int | None = None, limit: int) -> list[Node]:
        """Return a job and what is below it, parents first, at most `limit` jobs and `depth` levels below it.

        Where something was left out, a node has more `children` than there are.
        """

        def work(executor: Executor) -> list[Node]:
            return list(_walk(executor, job.id, depth, limit))

        return self._runtime.connections.transact("inspect", work)

    def stats(self) -> dict[str, Any]:
        """Return what a person or a monitor wants to know first, as JSON values."""
        connections = self._runtime.connections
        return {
            "jobs": jobs.count(connections, "status"),
            "queues": {
                row.queue: {
                    "messages": row.messages,
                    "unpublished": row.unpublished,
                    "running": row.running,
                    "oldest_due_s": max(0.0, row.oldest_due_s) if row.oldest_due_s is not None else None,
                }
                for row in messages.depth(connections)
            },
            "dead": dead.count(connections),
            "workers": [
                {
                    "id": row.id,
                    "ident": row.ident,
                    "alive": row.dead_at is None,
                    "suspected": row.suspect_at is not None,
                }
                for row in workers.list_all(connections)
            ],
        }

    # ------------------------------------------------------------------------------------------------------------

    def _details(self, executor: Executor, job_id: int) -> dict[str, Any]:
        found = jobs.find(executor, [job_id])
        if not found:
            raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
        children = jobs.nodes_below(executor, [job_id], limit=CHILDREN)
        node = jobs.node(executor, job_id)
        message = messages.of_job(executor, job_id)
        return {
            **self.info(Job(job_id, runtime=self._runtime, row=found[0])),
            "aliases": aliases.of(executor, job_id),
            "state": {key: values.decode(text) for key, text in state.read(executor, job_id).items()},
            **_ports(executor, job_id),
            "children": {row.name: {"id": row.id, "task": row.task, "status": row.status} for row in children},
            "children_count": node.children if node is not None else 0,
            "message": message and message._asdict(),
            "timers": [row._asdict() for row in asks.timers_of(executor, job_id, limit=CHILDREN)],
            "dead": self._dead(dead.of_job(executor, job_id)),
        }

    def _dead(self, row: Any | None) -> dict[str, Any] | None:
        if row is None:
            return None
        return {
            "id": row.id,
            "task_id": row.task_id,
            "reason": row.reason,
            "error": row.error and self._redacted(row.error),
            "traceback": row.traceback and self._redacted(row.traceback),
            "died_at": row.died_at,
            "retries": row.retries,
        }

    def _redacted(self, value: Any) -> Any:
        """Return what `sidejob_redact` leaves of a value; nothing of it if that raises."""
        redact = self._runtime.settings.redact
        if redact is None:
            return value
        try:
            return redact(value)
        except Exception as error:
            return f"(not shown: sidejob_redact raised {type(error).__name__})"


def _ports(executor: Executor, job_id: int) -> Mapping[str, dict[str, Any]]:
    waiting = packets.count_by_port(executor, job_id)
    shown: dict[str, dict[str, Any]] = {"inports": {}, "outports": {}}
    for row in ports.of_jobs(executor, [job_id]):
        port = {"packets": waiting.get(row.id, 0), "channels": list(row.channels)}
        if row.default_value is not None:  # null is a default
            port["default"] = values.decode(row.default_value)
        shown[f"{row.direction}ports"][row.name] = port
    return shown


def _walk(executor: Executor, root: int, depth: int | None, limit: int) -> Iterator[Node]:
    """Read a tree level by level, so that no more is read than is shown."""
    row = jobs.node(executor, root)
    if row is None:
        raise JobNotFoundError(f"There is no job {root}: it was deleted, or never committed.")
    yield _node(row, 0)
    seen, level, down = {root}, [row], 0
    while level and len(seen) < limit and (depth is None or down < depth):
        down += 1
        above = [row.id for row in level if row.children]
        found = jobs.nodes_below(executor, above, limit=limit - len(seen)) if above else ()
        level = [row for row in found if row.id not in seen]  # one that was adopted meanwhile is shown once
        seen.update(row.id for row in level)
        yield from (_node(row, down) for row in level)


def _node(row: Any, depth: int) -> Node:
    return Node(row.id, row.parent_id, row.name, row.task, row.status, depth, row.children)

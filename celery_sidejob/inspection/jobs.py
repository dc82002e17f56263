"""Views of jobs: a job with all that belongs to it, a tree, and the columns that a list shows beside each job.

And of batches: how their members have ended, and the calls that follow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..jobs.filters import filters_of
from ..jobs.job import Job
from ..jobs.port import Port
from ..model import values
from ..model.checks import check_texts
from ..model.errors import batch_not_found, job_not_found
from ..model.status import MAY_WAIT, Progress, Status
from ..operations import waiting
from ..operations.runtime import Runtime
from ..store import asks, batches, dead, dependencies, history, job_lists, jobs, packets, ports, room, trees
from ..store.outbox import doorbells
from ..store.statement import Transaction, picked
from ..unit.view import entry_of
from .queues import served_queues

LOOK_S = 0.06
"""For how many seconds a page of a list looks through jobs that no index finds."""
STEP = 50
"""How many jobs are asked at once why they wait."""
CHILDREN = 100
"""How many children and timers are shown with a job; `tree` and `jobs` show more, in pages."""
COUNTED = 10_000
"""The most members of a batch that a list of batches counts."""
DEEPEST = 10_000
"""The most levels of a tree that are shown below its first job."""


@dataclass(frozen=True, slots=True)
class Node:
    """A job in a tree."""

    id: int
    parent: int | None
    child_name: str | None
    task: str
    status: str
    depth: int
    children: int
    """The number of its children, including those that are not shown; counted up to 10,000."""
    more_children: bool = False
    """Whether it has more than 10,000."""
    progress: dict[str, Any] | None = None
    """How far its present or last run is, as reported by that run."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some of the jobs that match filters."""

    jobs: list[Job]
    next: int | None
    """The id from which the next page goes on; None at the end."""
    looked_to: int | None
    """The same id, if the time was over before the page was full: there may be more that match."""


class JobViews:
    """Read-only views of the jobs of one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def details(self, job: Job) -> dict[str, Any]:
        """Return everything about a job that a person may want to see.

        The document has the job's `info`, aliases, state, ports, the first `CHILDREN` children, the message of its
        present or next run, timers, the jobs that wait for room on a port (`waiting_for_room`: the job itself, or
        others on its ports), the first `CHILDREN` jobs that it depends on, and that depend on it (`dependencies`,
        `dependents`), the value that its last asking has returned (`result`, None also while another asking is open),
        and its entry in the dead set. `queue_served`: whether a live worker serves the job's queue; None if a worker
        has not recorded its queues yet. Packets of a port, and children, are counted up to 10,000; `more_packets` and
        `more_children` say whether there are more.
        """

        return self._runtime.connections.transact("inspect", lambda executor: self._details(executor, job.id))

    def standing(self, job: Job) -> dict[str, Any]:
        """Return a job's `info`, its progress and the reasons why it waits."""

        def work(executor: Transaction) -> dict[str, Any]:
            found = jobs.find(executor, [job.id])
            if not found:
                raise job_not_found(job.id)
            return {
                **Job(job.id, runtime=self._runtime, row=found[0]).info,
                "progress": _progress(jobs.progress(executor, job.id), self._runtime.settings.redacted),
                "waiting_for": waiting.reasons(executor, self._runtime, [job.id]).get(job.id, []),
            }

        return self._runtime.connections.transact("inspect", work)

    def waiting_for(self, jobs: Iterable[Job]) -> dict[int, list[str]]:
        """Return the `waiting_for` of each job, by its id; one statement, whose rows are found by their keys."""
        ids = [job.id for job in jobs]
        return self._runtime.connections.transact(
            "inspect", lambda executor: waiting.reasons(executor, self._runtime, ids)
        )

    def page(self, filters: Mapping[str, Any], *, limit: int, newest_first: bool = True) -> JobPage:
        """Return the next jobs that match, as `sidejob.jobs` does, but look through jobs for `LOOK_S` only.

        `text`, a filter more, is a part of the arguments as JSON. Text that `sidejob_redact` hides is not found.
        """
        text, reason = filters.get("text"), filters.get("waiting_for")
        which = filters_of(self._runtime, filters)
        if text is not None:
            check_texts(text=text)
            which = replace(which, text=json.dumps(text)[1:-1].replace('\\"', '"'))
        if reason is not None:
            waiting.check_reason(reason)
            which = replace(which, statuses=which.statuses or [str(status) for status in sorted(MAY_WAIT)])
        found: list[Job] = []
        until = time.monotonic() + LOOK_S
        while True:
            # What is hidden must not tell by the end of a page that it is there: then all that match are read.
            most = job_lists.LOOKED if text is not None else STEP if reason is not None else limit + 1 - len(found)
            rows, last = job_lists.look(self._runtime.connections, which, limit=most, newest_first=newest_first)
            looked = [Job(row.id, runtime=self._runtime, row=row) for row in rows]
            found += self._matching(looked, which.text, reason)
            if len(found) > limit:
                return JobPage(found[:limit], found[limit - 1].id, None)
            if last is None:
                return JobPage(found, None, None)
            if time.monotonic() > until:
                return JobPage(found, last, last)
            which = replace(which, before=last) if newest_first else replace(which, after=last)

    def _matching(self, looked: list[Job], text: str | None, reason: str | None) -> list[Job]:
        """Leave out jobs whose arguments do not have this text, or that do not wait for this reason."""
        if text is not None:
            looked = [job for job in looked if self._shows(job, text)]
        if reason is not None:
            why = self.waiting_for(looked)
            looked = [job for job in looked if reason in why.get(job.id, ())]
        return looked

    def _shows(self, job: Job, text: str) -> bool:
        """Tell whether the arguments of a job, as people may see them, have this text."""
        hide = self._runtime.settings.redacted
        return self._runtime.settings.redact is None or text in json.dumps(
            [hide(job.args), hide(job.kwargs)], default=str, separators=(",", ":")
        )

    def lasted(self, jobs: Iterable[Job]) -> dict[int, float]:
        """Return how many seconds the last run of each job took, by its id; one statement, as `waiting_for`.

        A job is missing if its run goes on or was lost, or if `sidejob_history` does not keep that run.
        """
        return history.lasted(self._runtime.connections, [job.id for job in jobs])

    def versions(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the version of each of these jobs, which changes with the job or its progress; one statement."""
        return jobs.versions(self._runtime.connections, ids)

    def brief(self, jobs_of_page: Iterable[Job]) -> list[dict[str, Any]]:
        """Return one line about each job: its names, times and error, why it waits, how long its last run took.

        Three statements, however many jobs; a job that is gone is missing.
        """
        ids = [job.id for job in jobs_of_page]
        hide = self._runtime.settings.redacted

        def work(executor: Transaction) -> list[dict[str, Any]]:
            rows = {row.id: row for row in jobs.find(executor, ids)}
            why, took = waiting.reasons(executor, self._runtime, ids), history.lasted(executor, ids)
            return [
                {
                    **picked(row, "id", "status", "task", "queue"),
                    "parent": row.parent_id,
                    **picked(row, "created_at", "ran_at", "retries", "losses"),
                    "error": _error(row.error, hide),
                    "waiting_for": why.get(row.id, []),
                    "lasted_s": took.get(row.id),
                }
                for row in map(rows.get, ids)
                if row is not None
            ]

        return self._runtime.connections.transact("inspect", work)

    def tree(self, job: Job, *, depth: int | None = None, limit: int) -> list[Node]:
        """Return a job and the jobs below it, parents first, at most `limit` jobs and `depth` levels.

        If jobs are missing from the list, their parent's `children` is larger than the number shown.
        """

        found = trees.tree(self._runtime.connections, job.id, depth=DEEPEST if depth is None else depth, limit=limit)
        if not found:
            raise job_not_found(job.id)
        told = jobs.progress_of_jobs(self._runtime.connections, [row.id for row in found])
        hide = self._runtime.settings.redacted
        return [_node(row, _progress(told.get(row.id), hide)) for row in found]

    def not_terminated(self, job: Job) -> Any | None:
        """Return (id, status) of a job that is not terminated, among a job and all jobs below it; None if all are."""
        return trees.other(self._runtime.connections, job.id, Status.TERMINATED)

    def count_below(self, job: Job) -> tuple[int, bool]:
        """Count the jobs below a job, up to 10,000, and tell whether there are more."""
        found = len(trees.subtree(self._runtime.connections, [job.id], most=trees.TOO_MANY + 1)) - 1
        return min(found, trees.COUNTED), found > trees.COUNTED

    def count_packets(self, port: Port) -> tuple[int, bool]:
        """Count the packets of a port, up to 10,000, and tell whether there are more."""
        found = packets.count_few(self._runtime.connections, (port.job.id, port.direction, port.name))
        return min(found, packets.COUNTED), found > packets.COUNTED

    def packets(self, port: Port, limit: int) -> list[dict[str, Any]]:
        """Return the next packets of a port without reading them."""
        hide = self._runtime.settings.redacted
        return [
            {**asdict(packet), "value": hide(packet.value), "context": hide(packet.context)}
            for packet in port.peek(limit)
        ]

    def _details(self, executor: Transaction, job_id: int) -> dict[str, Any]:
        shown, found = trees.tree(executor, job_id, depth=1, limit=1 + CHILDREN), jobs.find(executor, [job_id])
        if not shown or not found:
            raise job_not_found(job_id)
        node, *children = shown
        message, served_now = doorbells.of_job(executor, job_id), served_queues(executor, self._runtime.settings)
        hide = self._runtime.settings.redacted
        return {
            **Job(job_id, runtime=self._runtime, row=found[0]).info,
            "aliases": [hide(alias) for alias in jobs.aliases_of(executor, job_id)],
            "history": [asdict(entry_of(row, hide)) for row in history.read(executor, job_id)],
            "state": hide({key: values.decode(text) for key, text in jobs.read_state(executor, job_id).items()}),
            **_ports(executor, job_id, hide),
            "children": {row.name: picked(row, "id", "task", "status") for row in children},
            "children_count": min(node.children, trees.COUNTED),
            "more_children": node.children > trees.COUNTED,
            "message": message and message._asdict(),
            "dependencies": [row.id for row in dependencies.dependencies_of(executor, job_id, limit=CHILDREN)],
            "dependents": [row.id for row in dependencies.dependents_of(executor, job_id, limit=CHILDREN)],
            "progress": _progress(jobs.progress(executor, job_id), hide),
            "waiting_for": waiting.reasons(executor, self._runtime, [job_id]).get(job_id, []),
            "timers": [row._asdict() for row in asks.pending_timers(executor, job_id, limit=CHILDREN)],
            "waiting_for_room": [row._asdict() for row in room.waiting(executor, job_id, limit=CHILDREN)],
            "queue_served": None if served_now is None else found[0].queue in served_now,
            "result": hide(self._result(executor, found[0].task_id)),
            "dead": self._dead(dead.of_job(executor, job_id)),
        }

    def _result(self, executor: Transaction, task_id: str | None) -> Any:
        """Return the value with which an asking has completed."""
        row = None if task_id is None else asks.outcome(executor, task_id)
        return values.decode(row.result) if row is not None and row.outcome == Status.COMPLETED else None

    def _dead(self, row: Any | None) -> dict[str, Any] | None:
        if row is None:
            return None
        return {
            **picked(row, "id", "task_id", "reason"),
            "error": row.error and self._runtime.settings.redacted(row.error),
            "traceback": row.traceback and self._runtime.settings.redacted(row.traceback),
            **picked(row, "died_at", "retries"),
        }


def _error(text: str | None, hide: Callable[[Any], Any]) -> dict[str, Any] | None:
    """Return the class of an error and its message."""
    if text is None:
        return None
    error = values.decode(text)
    return {"type": error["type"], "message": hide(error["message"])}


def _progress(row: Any | None, hide: Callable[[Any], Any]) -> dict[str, Any] | None:
    """Return how far a run is, with its text for people (`shown`)."""
    if row is None:
        return None
    found = Progress(row.done, row.total, hide(row.note), row.run_no, row.told_at)
    return {**asdict(found), "fraction": found.fraction, "shown": str(found)}


def _ports(executor: Transaction, job_id: int, hide: Callable[[Any], Any]) -> Mapping[str, dict[str, Any]]:
    waiting = packets.count_by_port(executor, job_id)
    shown: dict[str, dict[str, Any]] = {"inports": {}, "outports": {}}
    for row in ports.of_jobs(executor, [job_id]):
        count = waiting.get(row.id, 0)
        port = {
            "packets": min(count, packets.COUNTED),
            "more_packets": count > packets.COUNTED,
            "channels": list(row.channels),
        }
        if row.packet_limit is not None:
            port["limit"] = row.packet_limit
        if row.default_value is not None:  # null is a valid default
            port["default"] = hide(values.decode(row.default_value))
        shown[f"{row.direction}ports"][row.name] = port
    return shown


def _node(row: Any, told: dict[str, Any] | None) -> Node:
    children = min(row.children, trees.COUNTED)
    return Node(
        row.id,
        row.parent_id,
        row.name,
        row.task,
        row.status,
        row.depth,
        children,
        more_children=row.children > children,
        progress=told,
    )


# -- batches -----------------------------------------------------------------------------------------------------------


class BatchViews:
    """Read-only views of the batches of one store; an end is counted once the sweeper has noted it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def page(self, *, before: int | None, limit: int) -> list[dict[str, Any]]:
        """Return the batches before an id, newest first; the members of each are counted up to `COUNTED`."""
        rows = batches.page(self._runtime.connections, before=before, limit=limit, most=COUNTED + 1)
        return [_batch(row, COUNTED) for row in rows]

    def one(self, name: str, *, limit: int) -> dict[str, Any]:
        """Return a batch with all members counted, its calls, and its first members that are `open` or `failed`."""

        def work(executor: Transaction) -> tuple[Any, dict[str, Any]]:
            row = batches.counted(executor, name)
            if row is None:
                raise batch_not_found(name)
            lists = ("failed", "open")
            return row, {which: batches.members(executor, row.id, which=which, limit=limit) for which in lists}

        row, members = self._runtime.connections.transact("inspect", work)
        hide = self._runtime.settings.redacted
        calls = {
            when: {
                "task": call["task"],
                "options": json.loads(call["options"]),
                **{given: hide(values.decode(call[given])) for given in ("args", "kwargs")},
            }
            for when, call in json.loads(row.calls).items()
        }
        shown = {which: [each._asdict() for each in rows] for which, rows in members.items()}
        return {**_batch(row), "calls": calls, "members": shown}


def _batch(row: Any, most: int | None = None) -> dict[str, Any]:
    state = "ended" if row.ended_at is not None else "closed" if row.closed_at is not None else "takes members"
    return {
        **picked(row, "id", "name"),
        "state": state,
        **picked(row, "created_at", "ended_at"),
        "is_more": most is not None and row.total > most,
        "total": min(row.total, most or row.total),
        **picked(row, "completed", "failed", "terminated"),
        "done": min(row.completed + row.failed + row.terminated, most or row.total),
    }

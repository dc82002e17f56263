"""Read-only views for commands and dashboards. The running side never imports this.

What comes from here is fit to be shown: arguments, aliases, state, ports' defaults, errors and tracebacks went through
`sidejob_redact`, also where `Job.info` shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .job import Job
from .model import values
from .model.durable import headers_of
from .model.errors import JobNotFoundError, SchemaError, StoreUnavailableError
from .model.measures import counts, durations
from .operations.runtime import Runtime
from .store import (
    aliases,
    asks,
    counters,
    dead,
    jobs,
    kept,
    messages,
    packets,
    ports,
    state,
    statistics,
    trees,
    workers,
)
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

    def details(self, job: Job) -> dict[str, Any]:
        """Return everything about a job that a person may want to see.

        That is `info` and its aliases, state, ports with the number of packets that wait, the first `CHILDREN`
        children and how many there are, the message of its present or next run, timers, and its dead entry.
        """

        def work(executor: Executor) -> dict[str, Any]:
            return self._details(executor, job.id)

        return self._runtime.connections.transact("inspect", work)

    def task(self, task_id: str) -> dict[str, Any] | None:
        """Return what is to be seen of an ordinary durable task that waits or runs; None if none of this id does.

        `status` is queued, scheduled (for its `eta` or a retry), running, or why it is about to be in the dead set.
        `store` is the name of a further store that has it. Raises StoreUnavailableError where one that may have it does
        not answer.
        """
        stores = self._runtime.stores
        failure: StoreUnavailableError | None = None
        for store in stores:
            try:
                row = store.connections.read(lambda executor: kept.of_task(executor, task_id), within_s=stores.wait_s)
                if row is not None:
                    return self._task(row, stores.label_of(store))
            except StoreUnavailableError as error:
                failure = error
        if failure is not None:
            raise failure
        return None

    def _task(self, row: Any, store: str | None) -> dict[str, Any]:
        headers, hide = headers_of(row.publication), self._runtime.settings.redacted
        return {
            "task_id": row.task_id,
            "task": row.task,
            "status": row.status,
            "queue": row.queue,
            "store": store,
            "args": hide(headers.get("argsrepr")),
            "kwargs": hide(headers.get("kwargsrepr")),
            "due_at": row.due_at,
            "expires_at": row.expires_at,
            "published_at": row.published_at,
            "running_since": row.locked_at,
            "worker": row.worker,
            "retries": headers.get("retries") or 0,
            "losses": row.losses,
            "revoked": row.doom == "revoked",
        }

    def tree(self, job: Job, *, depth: int | None = None, limit: int) -> list[Node]:
        """Return a job and what is below it, parents first, at most `limit` jobs and `depth` levels below it.

        Where something was left out, a node has more `children` than there are.
        """

        def work(executor: Executor) -> list[Node]:
            return list(_walk(executor, job.id, depth, limit))

        return self._runtime.connections.transact("inspect", work)

    def stats(self) -> dict[str, Any]:
        """Return what a person or a monitor wants to know first, as JSON values; reads nothing that is finished.

        Ages are seconds, None where nothing waits. `counters` and `durations` are totals of all workers since the
        schema was made; what a process had counted in its last seconds before it was killed is missing from them.
        Where there are further stores, `queues` and `dead` tell of all that answer, and `stores` which those are. A
        store that is silent is waited for a few seconds; raises StoreUnavailableError if that is the primary.
        `dead_list` counts what the transport `sidejob://` has given up, None with another or if the broker is silent.
        """
        all_stores = self._runtime.stores
        found = self._runtime.connections.transact("stats", self._stats, within_s=all_stores.look_s(self._runtime))
        stores: list[dict[str, Any]] = []
        for store in all_stores.others(self._runtime):
            try:
                added = store.connections.transact("stats", _of_tasks, within_s=all_stores.look_s(store))
                name = all_stores.label_of(store)
            except (StoreUnavailableError, SchemaError) as error:
                stores.append({"place": store.place, "name": None, "answers": False, "error": str(error)})
                continue
            _add(found, added)
            stores.append({"place": store.place, "name": name, "answers": True, "error": None})
        return {**found, "stores": stores, "dead_list": self._runtime.publisher.dead_list()}

    def _stats(self, executor: Executor) -> dict[str, Any]:
        known = counters.exist(executor)
        totals = counters.read(executor) if known else {}
        here = workers.list_all(executor, self._runtime.settings)
        silent = [row.id for row in here if row.silent_s is not None]
        served = {row.queue: row.workers for row in counters.served(executor, silent)} if known else {}
        depths = {row.queue: row for row in messages.depth(executor)}
        buried = dead.counts(executor)
        results = statistics.results(executor)
        return {
            "jobs": {**statistics.unfinished(executor), **({"failed": buried.jobs} if buried.jobs else {})},
            "queues": {name: _queue(depths.get(name), served.get(name, 0)) for name in sorted({*depths, *served})},
            "timers": _timers(statistics.timers(executor)),
            "results": {"unsent": results.unsent, "oldest_s": results.oldest_s},
            "dead": {
                "entries": buried.entries,
                "groups": [
                    {"task": row.task, "error": row.error, "entries": row.entries}
                    for row in statistics.dead_groups(executor)
                ]
                if buried.entries
                else [],
            },
            "workers": [
                {
                    "id": row.id,
                    "ident": row.ident,
                    "alive": row.dead_at is None and row.silent_s is None,
                    "suspected": row.dead_at is None and row.suspect_at is not None,
                    "stopped": row.dead_at is not None and row.suspect_at is None,  # it left by itself
                    "silent_s": row.silent_s,
                }
                for row in here
            ],
            "sweep": _sweep(statistics.sweep(executor)),
            "counters": counts(totals),
            "durations": durations(totals),
        }

    def pending(self, queue: str | None = None, *, horizon_s: float) -> dict[str, Any]:
        """Return what is still to be done, of one queue or of all, and what rests until something is asked of it.

        `queues` has those with runs that are due within the horizon, or in progress, and `unserved` names those of
        them that no worker serves which is alive. `later` counts runs whose `eta`
        or backoff ends after it, `suspended` and `timers` what no worker can bring to an end now, `results` those that
        the backend does not have yet.
        """

        def depth(executor: Executor) -> Sequence[Any]:
            return [row for row in messages.depth(executor, horizon_s=horizon_s) if queue in (None, row.queue)]

        def work(executor: Executor) -> tuple[Sequence[Any], Any, int, set[str] | None]:
            return (
                depth(executor), statistics.resting(executor, queue), statistics.results(executor).unsent,
                self._served(executor),
            )  # fmt: skip

        stores = self._runtime.stores
        here, rest, unsent, served = self._runtime.connections.transact(
            "inspect", work, within_s=stores.look_s(self._runtime)
        )
        rows = [*here]
        for store in stores.others(self._runtime):
            rows += store.connections.transact("inspect", depth, within_s=stores.look_s(store))
        queued: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for row in rows:
            queued[row.queue] += row.depth + row.delayed + row.scheduled - row.later
            running[row.queue] += row.running
        queues = {
            name: {"queued": queued[name], "running": running[name]}
            for name in queued if queued[name] or running[name]
        }  # fmt: skip
        return {
            "queues": queues,
            "unserved": [] if served is None else sorted(queues.keys() - served),
            "later": sum(row.later for row in rows),
            "later_from": min((row.later_from for row in rows if row.later), default=None),
            "suspended": rest.suspended,
            "timers": rest.timers,
            "results": unsent,
        }  # fmt: skip

    def knows_queue(self, queue: str) -> bool:
        """Tell whether a worker serves a queue, or anything in a store is of it; may read all jobs."""

        def in_use(executor: Executor) -> bool:
            served = counters.served(executor, ()) if counters.exist(executor) else ()
            return any(row.queue == queue for row in served) or jobs.knows_queue(executor, queue)

        def kept(executor: Executor) -> bool:
            return any(row.queue == queue for row in messages.depth(executor))

        stores = self._runtime.stores
        return self._runtime.connections.transact("inspect", in_use) or any(
            store.connections.transact("inspect", kept, within_s=stores.look_s(store))
            for store in stores.others(self._runtime)
        )

    # ------------------------------------------------------------------------------------------------------------

    def _served(self, executor: Executor) -> set[str] | None:
        """Read which queues live workers serve; None if one of them has not said so, or none could."""
        if not counters.exist(executor):
            return None
        silent = workers.silent(executor, self._runtime.settings)
        if counters.unannounced(executor, silent):
            return None
        return {row.queue for row in counters.served(executor, silent)}

    def _details(self, executor: Executor, job_id: int) -> dict[str, Any]:
        found = jobs.find(executor, [job_id])
        if not found:
            raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
        children = trees.nodes_below(executor, [job_id], limit=CHILDREN)
        node = trees.node(executor, job_id)
        message = messages.of_job(executor, job_id)
        hide = self._runtime.settings.redacted
        return {
            **Job(job_id, runtime=self._runtime, row=found[0]).info,
            "aliases": [hide(alias) for alias in aliases.of(executor, job_id)],
            "state": hide({key: values.decode(text) for key, text in state.read(executor, job_id).items()}),
            **_ports(executor, job_id, hide),
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
            "error": row.error and self._runtime.settings.redacted(row.error),
            "traceback": row.traceback and self._runtime.settings.redacted(row.traceback),
            "died_at": row.died_at,
            "retries": row.retries,
        }


def _of_tasks(executor: Executor) -> dict[str, Any]:
    """Read what there is to be told of a store that has durable tasks only."""
    return {
        "queues": {row.queue: _queue(row, 0) for row in messages.depth(executor)},
        "dead": {
            "entries": dead.count(executor),
            "groups": [
                {"task": row.task, "error": row.error, "entries": row.entries}
                for row in statistics.dead_groups(executor)
            ],
        },
    }


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add what another store has."""
    for name, theirs in more["queues"].items():
        ours = found["queues"].setdefault(name, _queue(None, 0))
        for what, value in theirs.items():
            if what.endswith("_s"):
                ours[what] = max((age for age in (ours[what], value) if age is not None), default=None)
            else:
                ours[what] += value
    found["dead"]["entries"] += more["dead"]["entries"]
    groups: Counter[tuple[str, str]] = Counter()
    for group in (*found["dead"]["groups"], *more["dead"]["groups"]):
        groups[group["task"], group["error"]] += group["entries"]
    found["dead"]["groups"] = [
        {"task": task, "error": error, "entries": entries} for (task, error), entries in groups.most_common()
    ]


def _queue(row: Any | None, served_by: int) -> dict[str, Any]:
    return {
        "depth": row.depth if row else 0,
        "running": row.running if row else 0,
        "delayed": row.delayed if row else 0,
        "scheduled": row.scheduled if row else 0,
        "unpublished": row.unpublished if row else 0,
        "oldest_due_s": row.oldest_due_s if row else None,
        "oldest_unpublished_s": row.oldest_unpublished_s if row else None,
        "workers": served_by,
    }


def _timers(row: Any) -> dict[str, Any]:
    due = row.oldest_due_s is not None and row.oldest_due_s >= 0
    return {"waiting": row.waiting, "oldest_due_s": row.oldest_due_s if due else None}


def _sweep(row: Any) -> dict[str, Any]:
    return {
        "lag_s": max(0.0, row.lag_s or 0.0),
        "sweeper": row.ident,
        "expired_s": max(0.0, row.expired_s) if row.holder is not None else None,
    }


def _ports(executor: Executor, job_id: int, hide: Callable[[Any], Any]) -> Mapping[str, dict[str, Any]]:
    waiting = packets.count_by_port(executor, job_id)
    shown: dict[str, dict[str, Any]] = {"inports": {}, "outports": {}}
    for row in ports.of_jobs(executor, [job_id]):
        port = {"packets": waiting.get(row.id, 0), "channels": list(row.channels)}
        if row.default_value is not None:  # null is a default
            port["default"] = hide(values.decode(row.default_value))
        shown[f"{row.direction}ports"][row.name] = port
    return shown


def _walk(executor: Executor, root: int, depth: int | None, limit: int) -> Iterator[Node]:
    """Read a tree level by level, so that no more is read than is shown."""
    row = trees.node(executor, root)
    if row is None:
        raise JobNotFoundError(f"There is no job {root}: it was deleted, or never committed.")
    yield _node(row, 0)
    seen, level, down = {root}, [row], 0
    while level and len(seen) < limit and (depth is None or down < depth):
        down += 1
        above = [row.id for row in level if row.children]
        found = trees.nodes_below(executor, above, limit=limit - len(seen)) if above else ()
        level = [row for row in found if row.id not in seen]  # one that was adopted meanwhile is shown once
        seen.update(row.id for row in level)
        yield from (_node(row, down) for row in level)


def _node(row: Any, depth: int) -> Node:
    return Node(row.id, row.parent_id, row.name, row.task, row.status, depth, row.children)

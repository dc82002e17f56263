"""Read-only views for commands and dashboards. The running side never imports this.

Everything here may be shown: `sidejob_redact` was applied to arguments, aliases, state, ports' defaults, errors and
tracebacks, as in `Job.info`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .jobs.job import Job
from .model import measures, values
from .model.durable import headers_of
from .model.errors import JobNotFoundError, SchemaError, StoreUnavailableError
from .operations.runtime import Runtime
from .services.sweep.duties import TOTALS
from .store import (
    aliases,
    asks,
    counters,
    dead,
    depths,
    job_lists,
    jobs,
    kept,
    packets,
    ports,
    served,
    state,
    statistics,
    trees,
    workers,
)
from .store.outbox import doorbells
from .store.statement import Transaction

CHILDREN = 100
"""How many children and timers are shown with a job; `tree` and `jobs` show more, in pages."""


COUNTED = {**measures.COUNTED, **{total: count.meaning for total, count in TOTALS.items()}}
"""The totals in `stats`, and what each means."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """One number of `stats`, as a metric, and in the tables of the command."""

    metric: str
    meaning: str
    """One sentence."""
    path: tuple[str, ...]
    """Its keys in `stats`; a number that is None is shown nowhere."""
    label: str | None = None
    """Its words in the tables of the command; None: it stands in another line there, or in none."""

    def of(self, found: Mapping[str, Any]) -> float | None:
        """Return its number in a document of `stats`."""
        value: Any = found
        for key in self.path:
            value = value[key]
        number: float | None = value
        return number


GAUGES = (
    Gauge("sidejob_timers", "Timers, due or in the future.", ("timers", "waiting"), "Timers"),
    Gauge("sidejob_timer_oldest_due_age_seconds", "How long the oldest due timer has been due.",
          ("timers", "oldest_due_s")),
    Gauge("sidejob_results_unsent", "Results that the backend does not have yet.", ("results", "unsent"),
          "Results not sent"),
    Gauge("sidejob_result_oldest_unsent_age_seconds", "How long the oldest of them has waited.",
          ("results", "oldest_s")),
    Gauge("sidejob_dead_entries", "Entries of the dead set.", ("dead", "entries")),
    Gauge("sidejob_dead_list_messages", "Messages in the dead list of the transport sidejob://.", ("dead_list",)),
    Gauge("sidejob_sweep_lag_seconds", "For how long the oldest item of the sweeper has been due.",
          ("sweep", "lag_s")),
)  # fmt: skip
"""The statistics that are one number each."""


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
    """Whether it has more than that."""


class Inspection:
    """Read-only views of one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def details(self, job: Job) -> dict[str, Any]:
        """Return everything about a job that a person may want to see.

        That is `info` and its aliases, state, ports with the number of packets that wait, the first `CHILDREN`
        children and how many there are (both counted up to 10,000: then there are `more_packets`, `more_children`), the
        message of its present or next run, timers, and its dead entry.
        """

        def work(executor: Transaction) -> dict[str, Any]:
            return self._details(executor, job.id)

        return self._runtime.connections.transact("inspect", work)

    def task(self, task_id: str) -> dict[str, Any] | None:
        """Return everything about a durable task that waits or runs; None if there is no such task.

        `status` is queued, scheduled (for its `eta` or a retry), running, or why it is about to be in the dead set.
        `store` is the name of the further store that has it. Raises StoreUnavailableError if a store that may have it
        does not answer.
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
        """Return a job and the jobs below it, parents first, at most `limit` jobs and `depth` levels.

        If jobs were left out, their parent's `children` is larger than the number shown.
        """

        def work(executor: Transaction) -> list[Node]:
            return list(_walk(executor, job.id, depth, limit))

        return self._runtime.connections.transact("inspect", work)

    def stats(self) -> dict[str, Any]:
        """Return the state of the store at a glance, as JSON values; very large numbers are estimated.

        `estimated` names the numbers that come from a sample: `dead`, `jobs`, `results`, `timers`, `queues.<name>`
        (without its `running`). Ages are seconds, None if nothing waits. `counters` and `durations` are totals of
        all workers since the schema was made; the counts of a killed process in its last seconds are
        missing from them.
        With further stores, `queues` and `dead` cover all that answer, and `stores` says which those are. A
        silent store is given a few seconds; raises StoreUnavailableError if it is the primary.
        `dead_list` counts the dead list of the transport `sidejob://`; None with another, or if the broker is silent.
        """
        all_stores, primary = self._runtime.stores, self._runtime.store
        found = primary.connections.transact("stats", self._stats, within_s=all_stores.look_s(primary))
        stores: list[dict[str, Any]] = []
        for store in all_stores.others(primary):
            try:
                added = store.connections.transact("stats", _of_tasks, within_s=all_stores.look_s(store))
                name = all_stores.label_of(store)
            except (StoreUnavailableError, SchemaError) as error:
                stores.append({"place": store.place, "name": None, "answers": False, "error": str(error)})
                continue
            _add(found, added)
            stores.append({"place": store.place, "name": name, "answers": True, "error": None})
        return {**found, "stores": stores, "dead_list": self._runtime.broker.dead_list()}

    def _stats(self, executor: Transaction) -> dict[str, Any]:
        totals = counters.read(executor)
        here = workers.list_all(executor, self._runtime.settings)
        silent = [row.id for row in here if row.silent_s is not None]
        serving = served.workers_of_queues(executor, silent)
        queues = {row.queue: row for row in depths.read(executor)}
        buried, failed = statistics.dead_entries(executor)
        results, unfinished = statistics.results(executor), statistics.unfinished(executor)
        timers, first_due_s = statistics.timers(executor)
        estimated = {
            "dead": buried.is_estimated,
            "jobs": unfinished.is_estimated or failed.is_estimated,
            "results": results.is_estimated,
            "timers": timers.is_estimated,
            **{f"queues.{name}": row.is_estimated for name, row in queues.items()},
        }
        return {
            "jobs": {**unfinished.jobs, **({"failed": failed.number} if failed.number else {})},
            "queues": {name: _queue(queues.get(name), serving.get(name, 0)) for name in sorted({*queues, *serving})},
            "timers": _timers(timers.number, first_due_s),
            "results": {"unsent": results.unsent, "oldest_s": results.oldest_s},
            "dead": {
                "entries": buried.number,
                "groups": [
                    {"task": row.task, "error": row.error, "entries": row.entries}
                    for row in statistics.dead_groups(executor)
                ]
                if buried.number
                else [],
            },
            "workers": [
                {
                    "id": row.id,
                    "ident": row.ident,
                    "alive": row.dead_at is None and row.silent_s is None,
                    "suspected": row.dead_at is None and row.suspect_at is not None,
                    "stopped": row.dead_at is not None and row.suspect_at is None,  # it stopped normally
                    "silent_s": row.silent_s,
                }
                for row in here
            ],
            "sweep": _sweep(statistics.sweep(executor)),
            "counters": measures.counts(totals, COUNTED),
            "durations": measures.durations(totals),
            "estimated": sorted(name for name, is_estimated in estimated.items() if is_estimated),
        }

    def pending(self, queue: str | None = None, *, horizon_s: float) -> dict[str, Any]:
        """Return the work that is left, in one queue or in all, and the jobs that rest.

        `queues` has those with runs that are due within the horizon, or in progress, and `unserved` names those of
        them that no worker serves which is alive. `later` counts runs whose `eta`
        or backoff ends after it, `suspended` and `timers` what no worker can bring to an end now, `results` those that
        the backend does not have yet.
        """

        def depth(executor: Transaction) -> Sequence[Any]:
            found = [row for row in depths.read(executor, horizon_s=horizon_s) if queue in (None, row.queue)]
            return [row if _is_sure(executor, row, horizon_s) else replace(row, soon=1) for row in found]

        def work(executor: Transaction) -> tuple[Sequence[Any], tuple[int, int], int, set[str] | None]:
            return (
                depth(executor), statistics.resting(executor, queue), statistics.results(executor).unsent,
                self._served(executor),
            )  # fmt: skip

        stores = self._runtime.stores
        here, (suspended, timers), unsent, served = self._runtime.connections.transact(
            "inspect", work, within_s=stores.look_s(self._runtime.store)
        )
        rows = [*here]
        for store in stores.others(self._runtime.store):
            rows += store.connections.transact("inspect", depth, within_s=stores.look_s(store))
        queued: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for row in rows:
            queued[row.queue] += row.soon
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
            "suspended": suspended,
            "timers": timers,
            "results": unsent,
        }  # fmt: skip

    def knows_queue(self, queue: str) -> bool:
        """Tell whether a queue exists: a worker serves it, or something in a store belongs to it.

        If it does not, all jobs and the dead set are read, a million of each in some seconds.
        """

        def in_use(executor: Transaction) -> bool:
            return queue in served.workers_of_queues(executor, ()) or job_lists.knows_queue(executor, queue)

        def kept(executor: Transaction) -> bool:
            return any(row.queue == queue for row in depths.read(executor))

        stores = self._runtime.stores
        return self._runtime.connections.transact("inspect", in_use) or any(
            store.connections.transact("inspect", kept, within_s=stores.look_s(store))
            for store in stores.others(self._runtime.store)
        )

    # ------------------------------------------------------------------------------------------------------------

    def _served(self, executor: Transaction) -> set[str] | None:
        """Read which queues live workers serve; None if one of them has not recorded its queues yet."""
        silent = workers.silent(executor, self._runtime.settings)
        if served.unannounced(executor, silent):
            return None
        return set(served.workers_of_queues(executor, silent))

    def _details(self, executor: Transaction, job_id: int) -> dict[str, Any]:
        found = jobs.find(executor, [job_id])
        if not found:
            raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
        children = trees.nodes_below(executor, [job_id], limit=CHILDREN)
        node = trees.node(executor, job_id)
        message = doorbells.of_job(executor, job_id)
        hide = self._runtime.settings.redacted
        return {
            **Job(job_id, runtime=self._runtime, row=found[0]).info,
            "aliases": [hide(alias) for alias in aliases.of(executor, job_id)],
            "state": hide({key: values.decode(text) for key, text in state.read(executor, job_id).items()}),
            **_ports(executor, job_id, hide),
            "children": {row.name: {"id": row.id, "task": row.task, "status": row.status} for row in children},
            "children_count": min(node.children, trees.COUNTED) if node is not None else 0,
            "more_children": node is not None and node.children > trees.COUNTED,
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


def _is_sure(executor: Transaction, row: Any, horizon_s: float) -> bool:
    """Tell whether nothing of a queue is to be done soon, if that is said of it: a sample may have missed it."""
    return bool(not row.is_estimated or row.soon or not depths.is_any_soon(executor, row.queue, horizon_s=horizon_s))


def _of_tasks(executor: Transaction) -> dict[str, Any]:
    """Read the statistics of a further store."""
    queues, (buried, _) = depths.read(executor), statistics.dead_entries(executor)
    estimated = [f"queues.{row.queue}" for row in queues if row.is_estimated]
    return {
        "queues": {row.queue: _queue(row, 0) for row in queues},
        "estimated": [*estimated, *(["dead"] if buried.is_estimated else [])],
        "dead": {
            "entries": buried.number,
            "groups": [
                {"task": row.task, "error": row.error, "entries": row.entries}
                for row in statistics.dead_groups(executor)
            ],
        },
    }


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the statistics of another store."""
    for name, theirs in more["queues"].items():
        ours = found["queues"].setdefault(name, _queue(None, 0))
        for what, value in theirs.items():
            if what.endswith("_s"):
                ours[what] = max((age for age in (ours[what], value) if age is not None), default=None)
            else:
                ours[what] += value
    found["dead"]["entries"] += more["dead"]["entries"]
    found["estimated"] = sorted({*found["estimated"], *more["estimated"]})
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


def _timers(waiting: int, first_due_s: float | None) -> dict[str, Any]:
    return {"waiting": waiting, "oldest_due_s": first_due_s if first_due_s is not None and first_due_s >= 0 else None}


def _sweep(row: Any) -> dict[str, Any]:
    return {
        "lag_s": max(0.0, row.lag_s or 0.0),
        "sweeper": row.ident,
        "expired_s": max(0.0, row.expired_s) if row.holder is not None else None,
    }


def _ports(executor: Transaction, job_id: int, hide: Callable[[Any], Any]) -> Mapping[str, dict[str, Any]]:
    waiting = packets.count_by_port(executor, job_id)
    shown: dict[str, dict[str, Any]] = {"inports": {}, "outports": {}}
    for row in ports.of_jobs(executor, [job_id]):
        count = waiting.get(row.id, 0)
        port = {
            "packets": min(count, packets.COUNTED), "more_packets": count > packets.COUNTED,
            "channels": list(row.channels),
        }  # fmt: skip
        if row.default_value is not None:  # null is a valid default
            port["default"] = hide(values.decode(row.default_value))
        shown[f"{row.direction}ports"][row.name] = port
    return shown


def _walk(executor: Transaction, root: int, depth: int | None, limit: int) -> Iterator[Node]:
    """Read a tree level by level, so that only the nodes that are shown are read."""
    row = trees.node(executor, root)
    if row is None:
        raise JobNotFoundError(f"There is no job {root}: it was deleted, or never committed.")
    yield _node(row, 0)
    seen, level, down = {root}, [row], 0
    while level and len(seen) < limit and (depth is None or down < depth):
        down += 1
        above = [row.id for row in level if row.children]
        found = trees.nodes_below(executor, above, limit=limit - len(seen)) if above else ()
        level = [row for row in found if row.id not in seen]  # a job that was adopted meanwhile is shown once
        seen.update(row.id for row in level)
        yield from (_node(row, down) for row in level)


def _node(row: Any, depth: int) -> Node:
    children = min(row.children, trees.COUNTED)
    return Node(
        row.id, row.parent_id, row.name, row.task, row.status, depth, children, more_children=row.children > children
    )

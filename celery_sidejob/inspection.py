"""Read-only views for commands and dashboards. The running side never imports this.

Everything here may be shown: `sidejob_redact` was applied to arguments, aliases, state, ports' defaults, errors and
tracebacks, as in `Job.info`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from .jobs.history import entry_of
from .jobs.job import Job
from .jobs.port import Port
from .model import measures, values
from .model.durable import headers_of
from .model.errors import SchemaError, StoreUnavailableError, job_not_found
from .model.loss import Loss
from .model.progress import Progress
from .model.statistics import Amount, Statistics, Tally, statistics_of
from .model.status import Status
from .operations import waiting
from .operations.runtime import Runtime
from .services.sweep.duties import TOTALS
from .store import (
    aliases,
    askings,
    asks,
    counters,
    dead,
    dependencies,
    depths,
    history,
    job_lists,
    jobs,
    kept,
    packets,
    ports,
    progress,
    queues,
    registry,
    room,
    served,
    state,
    stats,
    tallies,
    task_history,
    trees,
    workers,
)
from .store.estimates import Count
from .store.outbox import doorbells
from .store.queues import ManagedQueue
from .store.statement import Transaction

CHILDREN = 100
"""How many children and timers are shown with a job; `tree` and `jobs` show more, in pages."""
DEEPEST = 10_000
"""Levels of a tree below its first job that are shown."""
NUMBERS = ("depth", "running", "delayed", "scheduled", "parked", "unpublished")
AGES = ("oldest_due_s", "oldest_unpublished_s")
NOBODY: Mapping[str, int] = MappingProxyType({})
LIVES = ("alive", "suspected", "silent", "dead", "stopped")
"""What `life_of` tells of a worker."""

Amounts = list[tuple[Tally, Amount]]
Entries = dict[tuple[str, str], int]
"""Entries of the dead set, {(queue, task): number}."""

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
    """Its words in the tables of the command; None if the tables show it elsewhere, or not at all."""

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
    Gauge("sidejob_dead_list_messages", "Messages in the dead list of sidejob:// or sidejobpg://.", ("dead_list",)),
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
    """Whether it has more than 10,000."""
    progress: dict[str, Any] | None = None
    """How far its present or last run is, as that has said."""


def by_task(amounts: Iterable[tuple[Tally, Amount]], failed: Entries, day: date | None) -> list[Statistics]:
    """Return the statistics of each task in each of its queues, in the order of the names."""
    found: dict[tuple[str, str], Amounts] = {key: [] for key in failed}
    for tally, amount in amounts:
        found.setdefault((tally.queue, tally.task), []).append((tally, amount))
    return [
        statistics_of(of_one, queue=queue, task=task, day=day, failed_now=failed.get((queue, task), 0))
        for (queue, task), of_one in sorted(found.items())
    ]


def life_of(worker: Mapping[str, Any]) -> str:
    """Return whether a worker of `stats` is alive: one of `LIVES`."""
    if worker["silent_s"] is not None:
        return "silent"
    if worker["stopped"]:
        return "stopped"
    if not worker["alive"]:
        return "dead"
    return "suspected" if worker["suspected"] else "alive"


class Inspection:
    """Read-only views of one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def details(self, job: Job) -> dict[str, Any]:
        """Return everything about a job that a person may want to see.

        The document has the job's `info`, aliases, state, ports, the first `CHILDREN` children, the message of its
        present or next run, timers, who waits for room on which port (`waiting_for_room`: the job itself, or others on
        its ports), the first `CHILDREN` of those that it depends on, and of those that depend on it (`dependencies`,
        `dependents`), the value that its last asking has returned (`result`, None also while another is open), and its
        entry in the dead set. `queue_served`: whether a live worker serves the job's queue; None if a worker has not
        said yet which queues it serves. Packets of a port, and children, are counted up to
        10,000; `more_packets` and `more_children` say whether there are more.
        """

        def work(executor: Transaction) -> dict[str, Any]:
            return self._details(executor, job.id)

        return self._runtime.connections.transact("inspect", work)

    def waiting_for(self, jobs: Iterable[Job]) -> dict[int, list[str]]:
        """Return the `waiting_for` of each job, by its id; one statement, whose rows are found by their keys."""
        ids = [job.id for job in jobs]
        return self._runtime.connections.transact(
            "inspect", lambda executor: waiting.reasons(executor, self._runtime, ids)
        )

    def lasted(self, jobs: Iterable[Job]) -> dict[int, float]:
        """Return how many seconds the last run of each job took, by its id; one statement, as `waiting_for`.

        A job is missing if its run goes on or was lost, or if `sidejob_history` does not keep that run.
        """
        return history.lasted(self._runtime.connections, [job.id for job in jobs])

    def names(self, of: Literal["task", "queue"]) -> set[str]:
        """Return the tasks or queues that the store knows without a look at the jobs.

        They are registered or served by workers, managed, in the statistics, or (tasks) in the dead set.
        """

        def work(executor: Transaction) -> set[str]:
            rows = [*registry.names(executor), *tallies.names(executor)]
            if of == "task":
                return {row.task for row in rows} | {*dead.tasks(executor)}
            return {row.queue for row in rows} | {*served.workers_of_queues(executor, ()), *queues.names(executor)}

        return self._runtime.connections.transact("inspect", work)

    def knows_task(self, task: str) -> bool:
        """Tell whether a job, or a durable task that waits or runs, is of this task.

        To find out that none is, all jobs are read, a million in a second.
        """
        return job_lists.knows_task(self._runtime.connections, task)

    def task(self, task_id: str) -> dict[str, Any] | None:
        """Return everything about a durable task that waits or runs; None if there is no such task.

        `status` is queued, scheduled (for its `eta` or a retry), gated (`waits_for` says whether by a pause, a limit, a
        rate or a pool), running, or the reason why it will be in the dead set.
        `store` is the name of the failover store that has it. Raises StoreUnavailableError if a store that may have it
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

    def tasks(
        self, *, limit: int, task: str | None = None, queue: str | None = None, statuses: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the first of the tasks that `count_tasks` counts, as `task` does, those of the primary store first.

        Running tasks come first, the longest first; then the others, in the order in which they are due. Reads all that
        wait or run.
        """
        found: list[dict[str, Any]] = []
        for store in self._runtime.stores:
            read = partial(kept.list_, task=task, queue=queue, statuses=statuses, limit=limit - len(found))
            rows = store.connections.read(read, within_s=self._runtime.stores.look_s(store))
            found += [self._task(row, self._runtime.stores.label_of(store)) for row in rows]
        return found

    def finished_tasks(self, *, limit: int, task: str | None = None, queue: str | None = None) -> list[dict[str, Any]]:
        """Return the durable tasks that have ended last, the newest first: those that `sidejob_task_history` keeps."""
        read = partial(task_history.read, task=task, queue=queue, limit=limit)
        return [row._asdict() for row in self._runtime.connections.transact("inspect", read)]

    def count_tasks(
        self, *, task: str | None = None, queue: str | None = None, statuses: Sequence[str] | None = None
    ) -> Counter[str]:
        """Count the durable tasks in all stores that wait or run and were not revoked, by status.

        Reads the messages of all that wait or run, also where `task`, `queue` and `statuses` choose few.
        """
        counts: Counter[str] = Counter()
        read = partial(kept.count, task=task, queue=queue, statuses=statuses)
        for store in self._runtime.stores:
            counts.update(store.connections.read(read, within_s=self._runtime.stores.look_s(store)))
        return counts

    def task_ids(
        self, *, page: int, task: str | None = None, queue: str | None = None, statuses: Sequence[str] | None = None
    ) -> Iterator[list[str]]:
        """Iterate over the ids of the tasks that `count_tasks` counts, a page at a time."""
        read = partial(kept.page, limit=page, task=task, queue=queue, statuses=statuses)
        for store in self._runtime.stores:
            after, look_s = "", self._runtime.stores.look_s(store)
            while found := store.connections.read(partial(read, after=after), within_s=look_s):
                yield found
                after = found[-1]

    def _task(self, row: Any, store: str | None) -> dict[str, Any]:
        headers, hide = headers_of(row.publication), self._runtime.settings.redacted
        return {
            "task_id": row.task_id,
            "task": row.task,
            "status": row.status,
            "waits_for": row.waits_for,
            "queue": row.queue,
            "store": store,
            "unique": hide(row.unique_key),
            "args": hide(headers.get("argsrepr")),
            "kwargs": hide(headers.get("kwargsrepr")),
            "due_at": row.due_at,
            "declined_at": row.declined_at,
            "expires_at": row.expires_at,
            "published_at": row.published_at,
            "running_since": row.locked_at,
            "runs_s": row.runs_s,
            "worker": row.worker,
            "retries": headers.get("retries") or 0,
            "losses": row.losses,
            "last_loss": None if row.last_loss is None else Loss.of_json(row.last_loss).redacted(hide).facts,
            "revoked": row.doom == "revoked",
        }

    def tree(self, job: Job, *, depth: int | None = None, limit: int) -> list[Node]:
        """Return a job and the jobs below it, parents first, at most `limit` jobs and `depth` levels.

        If jobs were left out, their parent's `children` is larger than the number shown.
        """

        found = trees.tree(self._runtime.connections, job.id, depth=DEEPEST if depth is None else depth, limit=limit)
        if not found:
            raise job_not_found(job.id)
        told = progress.of_jobs(self._runtime.connections, [row.id for row in found])
        hide = self._runtime.settings.redacted
        return [_node(row, _progress(told.get(row.id), hide)) for row in found]

    def not_terminated(self, job: Job) -> Any | None:
        """Return (id, status) of one among a job and everything below it that is not terminated; None if all are."""
        return trees.other(self._runtime.connections, job.id, Status.TERMINATED)

    def count_below(self, job: Job) -> tuple[int, bool]:
        """Count the jobs below a job, up to 10,000, and tell whether there are more."""
        found = len(trees.subtree(self._runtime.connections, [job.id], most=trees.TOO_MANY + 1)) - 1
        return min(found, trees.COUNTED), found > trees.COUNTED

    def packets(self, port: Port, limit: int) -> list[dict[str, Any]]:
        """Return the next packets of a port without reading them."""
        hide = self._runtime.settings.redacted
        return [
            {**asdict(packet), "value": hide(packet.value), "context": hide(packet.context)}
            for packet in port.peek(limit)
        ]

    def standing(self, job: Job) -> dict[str, Any]:
        """Return a job's `info`, its progress and what it waits for."""

        def work(executor: Transaction) -> dict[str, Any]:
            found = jobs.find(executor, [job.id])
            if not found:
                raise job_not_found(job.id)
            return {
                **Job(job.id, runtime=self._runtime, row=found[0]).info,
                "progress": _progress(progress.read(executor, job.id), self._runtime.settings.redacted),
                "waiting_for": waiting.reasons(executor, self._runtime, [job.id]).get(job.id, []),
            }

        return self._runtime.connections.transact("inspect", work)

    def statistics(self, queue: str | None, task: str | None, day: date | None) -> Statistics:
        """Return what the runs of a task in a queue have taken, added up; None for one of them means all."""
        amounts, failed = self._tallies(queue, task, day)
        return statistics_of(amounts, queue=queue, task=task, day=day, failed_now=sum(failed.values()))

    def statistics_of_tasks(self, day: date | None) -> list[Statistics]:
        """Return the same for each task in each of its queues, in the order of the names."""
        return by_task(*self._tallies(None, None, day), day)

    def tallies_ever(self) -> Amounts:
        """Return the tallies of all runs since the schema was made, for monitors."""
        return list(tallies.read(self._runtime.connections, day=tallies.EVER))

    def _tallies(self, queue: str | None, task: str | None, day: date | None) -> tuple[Amounts, Entries]:
        def work(executor: Transaction) -> tuple[Amounts, Entries]:
            found = list(tallies.read(executor, queue=queue, task=task, day=day))
            return found, stats.dead_of(executor, queue=queue, task=task)

        return self._runtime.connections.transact("stats", work)

    def stats(self) -> dict[str, Any]:
        """Return the state of the store at a glance, as JSON values; very large numbers are estimated.

        `estimated` names the numbers that come from a sample: `dead`, `jobs`, `results`, `timers`, `queues.<name>`
        (without its `running`). Ages are seconds, None if nothing waits. `counters` and `durations` are totals of all
        workers since the schema was made; they lack what a killed process counted in its last seconds. With failover
        stores, `queues` and `dead` cover all stores that answer, and `stores` says which do. A silent store is given a
        few seconds; raises StoreUnavailableError if it is the primary. `dead_list` counts the dead list of the
        transport `sidejob://` or `sidejobpg://`; it is None with another transport, or if the broker is silent.
        """
        all_stores, primary = self._runtime.stores, self._runtime.store
        found = primary.connections.transact("stats", self._stats, within_s=all_stores.look_s(primary))
        stores: list[dict[str, Any]] = []
        for store in all_stores.others(primary):
            try:
                added, _ = store.connections.transact("stats", _of_tasks, within_s=all_stores.look_s(store))
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
        of_tasks, failed = _of_tasks(executor, serving)
        results, unfinished = stats.results(executor), stats.unfinished(executor)
        timers, first_due_s = stats.timers(executor)
        estimated = {
            "jobs": unfinished.is_estimated or failed.is_estimated,
            "results": results.is_estimated,
            "timers": timers.is_estimated,
        }
        return {
            "jobs": {**unfinished.jobs, **({"failed": failed.number} if failed.number else {})},
            **of_tasks,
            "timers": {
                "waiting": timers.number,
                "oldest_due_s": None if first_due_s is None or first_due_s < 0 else first_due_s,
            },
            "results": {"unsent": results.unsent, "oldest_s": results.oldest_s},
            "workers": [
                {
                    "id": row.id,
                    "ident": row.ident,
                    "broker": row.broker,
                    "alive": row.dead_at is None and row.silent_s is None,
                    "suspected": row.dead_at is None and row.suspect_at is not None,
                    "stopped": row.dead_at is not None and row.suspect_at is None,  # it stopped normally
                    "silent_s": row.silent_s,
                }
                for row in here
            ],
            "sweep": _sweep(stats.sweep(executor)),
            "counters": measures.counts(totals, COUNTED),
            "durations": measures.durations(totals),
            "estimated": sorted([*of_tasks["estimated"], *(name for name, is_one in estimated.items() if is_one)]),
        }

    def pending(self, queue: str | None = None, *, horizon_s: float) -> dict[str, Any]:
        """Return the work that is left, in one queue or in all, and the jobs that rest.

        `queues` has the queues with runs that are due within the horizon or in progress; `unserved` names those of
        them that no live worker serves. `parked` counts runs whose task no worker of their queue knows. `later` counts
        runs whose `eta` or backoff ends after the horizon. `suspended` jobs and `timers` cannot be brought to an end by
        a worker now. `results` counts results that the backend does not have yet.
        """

        def depth(executor: Transaction) -> Sequence[Any]:
            found = [row for row in depths.read(executor, horizon_s=horizon_s) if queue in (None, row.queue)]
            return [row if _is_sure(executor, row, horizon_s) else replace(row, soon=1) for row in found]

        def work(executor: Transaction) -> tuple[Sequence[Any], dict[str, int], set[str] | None]:
            suspended, timers = stats.resting(executor, queue)
            rest = {"suspended": suspended, "timers": timers, "results": stats.results(executor).unsent}
            return depth(executor), rest, self._served(executor)

        stores = self._runtime.stores
        here, rest, served = self._runtime.connections.transact(
            "inspect", work, within_s=stores.look_s(self._runtime.store)
        )
        rows = [*here]
        for store in stores.others(self._runtime.store):
            rows += store.connections.transact("inspect", depth, within_s=stores.look_s(store))
        queues: dict[str, Counter[str]] = {}
        for row in rows:
            if row.soon or row.running:
                queues.setdefault(row.queue, Counter()).update(queued=row.soon, running=row.running)
        return {
            "queues": {name: dict(counts) for name, counts in queues.items()},
            "unserved": [] if served is None else sorted(queues.keys() - served),
            "parked": sum(row.parked for row in rows),
            "later": sum(row.later for row in rows),
            "later_from": min((row.later_from for row in rows if row.later), default=None),
            **rest,
        }

    def knows_queue(self, queue: str) -> bool:
        """Tell whether a queue exists: a worker serves it, or a row in a store belongs to it.

        To find out that it does not, all jobs and the dead set are read, a million of each in some seconds.
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
        shown, found = trees.tree(executor, job_id, depth=1, limit=1 + CHILDREN), jobs.find(executor, [job_id])
        if not shown or not found:
            raise job_not_found(job_id)
        node, *children = shown
        message, served_now = doorbells.of_job(executor, job_id), self._served(executor)
        hide = self._runtime.settings.redacted
        return {
            **Job(job_id, runtime=self._runtime, row=found[0]).info,
            "aliases": [hide(alias) for alias in aliases.of(executor, job_id)],
            "history": [asdict(entry_of(row, hide)) for row in history.read(executor, job_id)],
            "state": hide({key: values.decode(text) for key, text in state.read(executor, job_id).items()}),
            **_ports(executor, job_id, hide),
            "children": {row.name: {"id": row.id, "task": row.task, "status": row.status} for row in children},
            "children_count": min(node.children, trees.COUNTED),
            "more_children": node.children > trees.COUNTED,
            "message": message and message._asdict(),
            "dependencies": [row.id for row in dependencies.dependencies_of(executor, job_id, limit=CHILDREN)],
            "dependents": [row.id for row in dependencies.dependents_of(executor, job_id, limit=CHILDREN)],
            "progress": _progress(progress.read(executor, job_id), hide),
            "waiting_for": waiting.reasons(executor, self._runtime, [job_id]).get(job_id, []),
            "timers": [row._asdict() for row in asks.pending_timers(executor, job_id, limit=CHILDREN)],
            "waiting_for_room": [row._asdict() for row in room.waiting(executor, job_id, limit=CHILDREN)],
            "queue_served": None if served_now is None else found[0].queue in served_now,
            "result": hide(self._result(executor, found[0].task_id)),
            "dead": self._dead(dead.of_job(executor, job_id)),
        }

    def _result(self, executor: Transaction, task_id: str | None) -> Any:
        """Return the value with which an asking has completed."""
        row = None if task_id is None else askings.outcome(executor, task_id)
        return values.decode(row.result) if row is not None and row.outcome == Status.COMPLETED else None

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
    """Tell whether `soon` can be trusted: where it is 0 by an estimate, the sample may have missed the rows."""
    return bool(not row.is_estimated or row.soon or not depths.is_any_soon(executor, row.queue, horizon_s=horizon_s))


def _of_tasks(executor: Transaction, serving: Mapping[str, int] = NOBODY) -> tuple[dict[str, Any], Count]:
    """Read the statistics that a failover store has too, and the number of jobs in the dead set.

    `serving` counts the workers of each queue.
    """
    depth = {row.queue: row for row in depths.read(executor)}
    managed = queues.read(executor)
    buried, failed = stats.dead_entries(executor)
    estimated = [f"queues.{name}" for name, row in depth.items() if row.is_estimated]
    groups = stats.dead_groups(executor) if buried.number else ()
    return {
        "queues": {
            name: {**_queue(depth.get(name), serving.get(name, 0)), **_gate(managed.get(name))}
            for name in sorted({*depth, *serving, *managed})
        },
        "dead": {"entries": buried.number, "groups": [row._asdict() for row in groups]},
        "estimated": [*estimated, *(["dead"] if buried.is_estimated else [])],
    }, failed


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the statistics of a failover store."""
    for name, theirs in more["queues"].items():
        ours = found["queues"].get(name, {**_queue(None, 0), **_gate(None)})
        found["queues"][name] = added(ours, theirs)
    found["dead"]["entries"] += more["dead"]["entries"]
    found["estimated"] = sorted({*found["estimated"], *more["estimated"]})
    groups: Counter[tuple[str, str, str]] = Counter()
    for group in (*found["dead"]["groups"], *more["dead"]["groups"]):
        groups[group["task"], group["group"], group["reason"]] += group["entries"]
    found["dead"]["groups"] = [
        {"task": task, "group": group, "reason": reason, "entries": entries}
        for (task, group, reason), entries in groups.most_common()
    ]


def added(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the statistics of a queue with the work of another one, or of its namesake in another store."""
    ages = {what: [row[what] for row in (ours, theirs) if row[what] is not None] for what in AGES}
    return {
        **ours,
        **{what: ours[what] + theirs[what] for what in NUMBERS},
        **{what: max(found, default=None) for what, found in ages.items()},
    }


def _queue(row: Any | None, served_by: int) -> dict[str, Any]:
    numbers = {name: getattr(row, name, 0) for name in NUMBERS}
    return {**numbers, **{name: getattr(row, name, None) for name in AGES}, "workers": served_by}


def _gate(queue: ManagedQueue | None) -> dict[str, Any]:
    if queue is None:
        return {"managed": False, "paused": False, "limit": None}
    return {"managed": True, "paused": queue.paused_at is not None, "limit": queue.settings.limit}


def _sweep(row: Any) -> dict[str, Any]:
    return {
        "lag_s": max(0.0, row.lag_s or 0.0),
        "sweeper": row.ident,
        "expired_s": max(0.0, row.expired_s) if row.holder is not None else None,
    }


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
            "packets": min(count, packets.COUNTED), "more_packets": count > packets.COUNTED,
            "channels": list(row.channels),
        }  # fmt: skip
        if row.packet_limit is not None:
            port["limit"] = row.packet_limit
        if row.default_value is not None:  # null is a valid default
            port["default"] = hide(values.decode(row.default_value))
        shown[f"{row.direction}ports"][row.name] = port
    return shown


def _node(row: Any, told: dict[str, Any] | None) -> Node:
    children = min(row.children, trees.COUNTED)
    return Node(
        row.id, row.parent_id, row.name, row.task, row.status, row.depth, children,
        more_children=row.children > children, progress=told,
    )  # fmt: skip

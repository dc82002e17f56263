"""The statistics of a store: `stats`, and the waits and durations of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from ..model.errors import SchemaError, StoreUnavailableError
from ..model.statistics import COUNTED as OF_EVENTS
from ..model.statistics import Amount, Statistics, Tally, counts, durations, statistics_of
from ..operations.runtime import Runtime
from ..services.sweep.sweeper import TOTALS
from ..store import measured, queues, registry, stats, waiting, workers
from ..store.queues import ManagedQueue
from ..store.statement import Transaction, picked
from ..store.stats import Count

NUMBERS = ("depth", "running", "delayed", "scheduled", "parked", "unpublished")
AGES = ("oldest_due_s", "oldest_unpublished_s")
NOBODY: Mapping[str, int] = MappingProxyType({})
LIVES = ("alive", "suspected", "silent", "dead", "stopped")
"""The possible results of `life_of`."""

Amounts = list[tuple[Tally, Amount]]
Entries = dict[tuple[str, str], int]
"""Entries of the dead set, {(queue, task): number}."""

COUNTED = {**OF_EVENTS, **{total: count.meaning for total, count in TOTALS.items()}}
"""The totals in `stats`, and the meaning of each."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """One number of `stats`, as a metric and in the tables of the command."""

    metric: str
    meaning: str
    """Its meaning, in one sentence."""
    path: tuple[str, ...]
    """Its keys in `stats`; a number that is None is shown nowhere."""
    label: str | None = None
    """Its label in the tables of the command; None if the tables show it elsewhere, or not at all."""

    def of(self, found: Mapping[str, Any]) -> float | None:
        """Return its number in a document of `stats`."""
        value: Any = found
        for key in self.path:
            value = value[key]
        number: float | None = value
        return number


GAUGES = (
    Gauge("sidejob_timers", "Timers, due or in the future.", ("timers", "waiting"), "Timers"),
    Gauge(
        "sidejob_timer_oldest_due_age_seconds",
        "How long the oldest due timer has been due.",
        ("timers", "oldest_due_s"),
    ),
    Gauge(
        "sidejob_results_unsent",
        "Results that the backend does not have yet.",
        ("results", "unsent"),
        "Results not sent",
    ),
    Gauge(
        "sidejob_result_oldest_unsent_age_seconds", "How long the oldest of them has waited.", ("results", "oldest_s")
    ),
    Gauge("sidejob_dead_entries", "Entries of the dead set.", ("dead", "entries")),
    Gauge("sidejob_dead_list_messages", "Messages in the dead list of sidejob:// or sidejobpg://.", ("dead_list",)),
    Gauge("sidejob_sweep_lag_seconds", "For how long the oldest item of the sweeper has been due.", ("sweep", "lag_s")),
)
"""The statistics that consist of one number."""


class StatisticsViews:
    """Statistics of one store, and of its failover stores."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def stats(self) -> dict[str, Any]:
        """Return the state of the store at a glance, as JSON values; very large numbers are estimated.

        `estimated` names the numbers that come from a sample: `dead`, `jobs`, `results`, `timers`, `queues.<name>`
        (without its `running`). Ages are seconds, None if nothing waits. `counters` and `durations` are totals of all
        workers since the schema was made; they lack the counts of a killed process's last seconds. With failover
        stores, `queues` and `dead` cover all stores that answer, and `stores` says which stores do. A silent store is
        given a few seconds; raises StoreUnavailableError if it is the primary. `dead_list` counts the dead list of the
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

    def statistics(self, queue: str | None, task: str | None, day: date | None, step: str | None) -> Statistics:
        """Return how long the runs of a task in a queue waited and ran, added up; None means all tasks or queues.

        With a step they are its executions.
        """
        amounts, failed = self._tallies(queue, task, day, step or "")
        failed_now = 0 if step else sum(failed.values())
        return statistics_of(amounts, queue=queue, task=task, day=day, failed_now=failed_now, step=step)

    def statistics_of_tasks(self, day: date | None) -> tuple[list[Statistics], list[Statistics]]:
        """Return the same for each task in each of its queues, and for each of their steps, by name."""
        found = of_each(*self._tallies(None, None, day, None), day)
        return [one for one in found if one.step is None], [one for one in found if one.step is not None]

    def days(self) -> dict[date, tuple[int, int]]:
        """Return the numbers of runs and of failures of each day that is kept, in UTC."""
        return measured.days(self._runtime.connections)

    def lately(self) -> list[tuple[datetime, int, int]]:
        """Return (time, runs, failures) since the time before, for each minute of the last day or more, and for now.

        A process of a worker stores its counts every ten seconds if it is busy. Without a sweeper there is no sample:
        then one time stands for all runs since the last.
        """
        rows = measured.samples(self._runtime.connections)
        return [(row.taken_at, row.runs - last.runs, row.failures - last.failures) for last, row in pairwise(rows)]

    def tallies_ever(self) -> Amounts:
        """Return the tallies of all runs and steps since the schema was made, for monitors."""
        return list(measured.tallies(self._runtime.connections, day=measured.EVER, step=None))

    def _tallies(
        self, queue: str | None, task: str | None, day: date | None, step: str | None
    ) -> tuple[Amounts, Entries]:
        def work(executor: Transaction) -> tuple[Amounts, Entries]:
            found = list(measured.tallies(executor, queue=queue, task=task, day=day, step=step))
            return found, stats.dead_of(executor, queue=queue, task=task)

        return self._runtime.connections.transact("stats", work)

    def _stats(self, executor: Transaction) -> dict[str, Any]:
        totals = measured.totals(executor)
        here = workers.list_all(executor, self._runtime.settings)
        silent = [row.id for row in here if row.silent_s is not None]
        serving = registry.workers_of_queues(executor, silent)
        of_tasks, failed = _of_tasks(executor, serving)
        (results, oldest_s), (jobs, are_estimated) = stats.results(executor), stats.unfinished(executor)
        timers, first_due_s = stats.timers(executor)
        estimated = {
            "jobs": are_estimated or failed.is_estimated,
            "results": results.is_estimated,
            "timers": timers.is_estimated,
        }
        return {
            "jobs": {**jobs, **({"failed": failed.number} if failed.number else {})},
            **of_tasks,
            "timers": {
                "waiting": timers.number,
                "oldest_due_s": None if first_due_s is None or first_due_s < 0 else first_due_s,
            },
            "results": {"unsent": results.number, "oldest_s": oldest_s},
            "workers": [
                {
                    **picked(row, "id", "ident", "broker"),
                    "alive": row.dead_at is None and row.silent_s is None,
                    "suspected": row.dead_at is None and row.suspect_at is not None,
                    "stopped": row.dead_at is not None and row.suspect_at is None,  # it stopped as planned
                    "silent_s": row.silent_s,
                }
                for row in here
            ],
            "sweep": _sweep(stats.sweep(executor)),
            "counters": counts(totals, COUNTED),
            "durations": durations(totals),
            "estimated": sorted([*of_tasks["estimated"], *(name for name, is_one in estimated.items() if is_one)]),
        }


def of_each(amounts: Iterable[tuple[Tally, Amount]], failed: Entries, day: date | None) -> list[Statistics]:
    """Return the statistics of each task in each of its queues, and of each of its steps, in the order of the names."""
    found: dict[tuple[str, str, str], Amounts] = {(queue, task, ""): [] for queue, task in failed}
    for tally, amount in amounts:
        found.setdefault((tally.queue, tally.task, tally.step), []).append((tally, amount))
    return [
        statistics_of(
            of_one,
            queue=queue,
            task=task,
            day=day,
            failed_now=0 if step else failed.get((queue, task), 0),
            step=step or None,
        )
        for (queue, task, step), of_one in sorted(found.items())
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


def _of_tasks(executor: Transaction, serving: Mapping[str, int] = NOBODY) -> tuple[dict[str, Any], Count]:
    """Read the statistics that failover stores have too, and the number of jobs in the dead set.

    `serving` counts the workers of each queue.
    """
    depth = {row.queue: row for row in waiting.depths(executor)}
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
    """Return the statistics of a queue with the work of another queue, or of its namesake in another store, added."""
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

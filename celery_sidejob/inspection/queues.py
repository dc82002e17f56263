"""Views of queues (the remaining work, and the names of all queues), capacity pools and schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, Literal

from ..jobs.queue import rate_in_text
from ..jobs.schedule import info_of
from ..model.settings import Settings
from ..operations.runtime import Runtime
from ..store import capacity, dead, job_lists, measured, queues, registry, schedules, stats, waiting, workers
from ..store.statement import Transaction, picked


class QueueViews:
    """Read-only views of queues."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def pending(self, queue: str | None = None, *, horizon_s: float) -> dict[str, Any]:
        """Return the remaining work, in one queue or in all, and the jobs that rest.

        `queues` has the queues with runs that are due within the horizon or in progress; `unserved` names the queues
        among them that no live worker serves. `parked` counts runs whose task no worker of their queue knows. `later`
        counts runs whose `eta` or backoff ends after the horizon. `suspended` jobs and `timers` cannot be brought to an
        end by a worker now. `results` counts results that the backend does not have yet.
        """

        def depth(executor: Transaction) -> Sequence[Any]:
            found = [row for row in waiting.depths(executor, horizon_s=horizon_s) if queue in (None, row.queue)]
            return [row if _is_sure(executor, row, horizon_s) else row._replace(soon=1) for row in found]

        def work(executor: Transaction) -> tuple[Sequence[Any], dict[str, int], set[str] | None]:
            suspended, timers = stats.resting(executor, queue)
            rest = {"suspended": suspended, "timers": timers, "results": stats.results(executor)[0].number}
            return depth(executor), rest, served_queues(executor, self._runtime.settings)

        here, rest, served = self._runtime.connections.transact("inspect", work, within_s=self._runtime.look_s)
        rows = [*here, *chain.from_iterable(self._runtime.inspect_others(depth))]
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

    def pools(self, limit: int) -> list[dict[str, Any]]:
        """Return the first capacity pools by their names: limit, used slots, and what came, went and was refused."""
        return [
            {
                "name": row.name,
                "limit": row.capacity,
                **picked(row, "used", "covers", "shards"),
                "in": row.admitted,
                "out": row.freed,
                "refused": row.refused,
                "in_60s": row.admitted - row.admitted_before,
                "out_60s": row.freed - row.freed_before,
                "refused_60s": row.refused - row.refused_before,
            }
            for row in capacity.page(self._runtime.connections, limit=limit)
        ]

    def gates(self) -> list[dict[str, Any]]:
        """Return the settings of each managed queue, and its pause."""
        return [
            {
                "name": name,
                "paused_at": found.paused_at,
                "reason": found.pause_reason,
                **picked(found.settings, "ordered", "limit", "limit_per_key"),
                "rate": None if found.settings.rate is None else rate_in_text(found.settings.rate),
            }
            for name, found in sorted(queues.read(self._runtime.connections).items())
        ]

    def knows_queue(self, queue: str) -> bool:
        """Tell whether a queue exists: a worker serves it, or a row in a store belongs to it.

        If it does not exist, all jobs and the dead set are read, a million of each in some seconds.
        """

        def in_use(executor: Transaction) -> bool:
            return queue in registry.workers_of_queues(executor, ()) or job_lists.knows_queue(executor, queue)

        def kept(executor: Transaction) -> bool:
            return any(row.queue == queue for row in waiting.depths(executor))

        return self._runtime.connections.transact("inspect", in_use) or any(self._runtime.inspect_others(kept))

    def names(self, of: Literal["task", "queue"]) -> set[str]:
        """Return the tasks or queues that the store knows without reading the jobs.

        They are registered or served by workers, managed, in the statistics, or (tasks) in the dead set.
        """

        def work(executor: Transaction) -> set[str]:
            rows = [*registry.registered(executor), *measured.tallied(executor)]
            if of == "task":
                return {row.task for row in rows} | {*dead.tasks(executor)}
            return {row.queue for row in rows} | {*registry.workers_of_queues(executor, ()), *queues.names(executor)}

        return self._runtime.connections.transact("inspect", work)


def served_queues(executor: Transaction, settings: Settings) -> set[str] | None:
    """Read which queues live workers serve; None if a live worker has not recorded its queues yet."""
    silent = workers.silent(executor, settings)
    if registry.unannounced(executor, silent):
        return None
    return set(registry.workers_of_queues(executor, silent))


def _is_sure(executor: Transaction, row: Any, horizon_s: float) -> bool:
    """Tell whether `soon` can be trusted: if it is an estimate of 0, the sample may have missed the rows."""
    return bool(not row.is_estimated or row.soon or not waiting.is_any_soon(executor, row.queue, horizon_s=horizon_s))


def all_schedules(runtime: Runtime, next_times: int) -> list[dict[str, Any]]:
    """Return the `info` of each schedule, by name, with its `next_times`; one statement."""
    found = sorted(schedules.read(runtime.connections).items())
    hide = runtime.settings.redacted
    return [{**info_of(row, hide), "next_times": list(islice(row.plan.upcoming(), next_times))} for _, row in found]

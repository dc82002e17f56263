"""Finds workers that died, and takes their runs; the `on_lost` of a durable task decides what follows."""

from __future__ import annotations

import time
from typing import Any

from ...model.crash_points import reach
from ...model.loss import Loss, LossKind
from ...operations.ledger import durable_runs
from ...operations.runs import recovery
from ...store import workers
from ...store.outbox import holds
from ..duty import Count, Report
from .sweep import Sweep, SweepDuty

TROUBLE_S = 10.0
"""Seconds after an outage of the store in which a free lock means nothing: its owner may still be reconnecting."""


class DeadWorkers(SweepDuty):
    """Suspects workers, then declares them dead: two steps, because only two observations make it irrevocable."""

    is_urgent = True
    counts = (
        Count(
            "declared_dead",
            "Workers declared dead for their silence or their free liveness lock.",
            total="workers_declared_dead",
        ),
        Count(
            "suspected",
            "Workers suspected of being dead: poll again in a while, one that stays silent is declared dead.",
            is_work=False,
        ),
    )

    def _do(self, report: Report) -> None:
        settings, worker = self._runtime.settings, self._sweep.worker
        silence_s = settings.lease / 2
        trouble_at = max(self._sweep.trouble_at, worker.lock_lost_at if worker else self._sweep.trouble_at)
        trouble = time.monotonic() - trouble_at < TROUBLE_S
        self._sweep.suspects = self._sweep.has_dead = False
        for row in workers.liveness(self._connections, schema=settings.schema, silence_s=silence_s):
            dead, suspected = row.dead_at is not None, row.suspect_at is not None
            if not dead and not suspected:
                by = "lock" if row.lock_free and not (row.restarted or trouble) else "silence" if row.silent else None
                if by is not None:
                    suspected = workers.suspect(self._connections, row.id, by=by, seen=row.beat_at)
                    self._sweep.suspects |= suspected
            elif not dead and not trouble:  # during trouble its beat may be delayed too
                self._sweep.suspects |= row.suspect_by == "lock"
                dead = workers.declare_dead(
                    self._connections, row.id, lock_grace_s=settings.lock_grace, silence_s=silence_s
                )
                report["declared_dead"] += dead
            report["suspected"] += suspected and not dead
            self._sweep.has_dead |= dead


class LostRuns(SweepDuty):
    """Takes all runs that dead workers hold, one job per transaction, and forgets workers without runs.

    Once per lease it also finds runs of forgotten workers, whose claims waited for a lock while the worker died.
    """

    is_urgent = True
    counts = (
        Count("rescued", "Lost runs rescued."),
        Count("tasks_taken", "Ordinary durable tasks taken from workers that died."),
    )

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self.interval_s = self._runtime.settings.lease

    def is_due(self) -> bool:
        """Tell whether there is a dead worker, or a lease has passed."""
        return self._sweep.has_dead or super().is_due()

    def _do(self, report: Report) -> None:
        for held in holds.held_by_dead(self._connections):
            reach("rescue:before")
            self._rescue(held, report)
        while taken := durable_runs.take_from_the_dead(self._runtime):
            report["tasks_taken"] += taken
        if self._sweep.has_dead:
            workers.forget_dead(self._connections)

    def _rescue(self, held: Any, report: Report) -> None:
        """Rescue a lost run, unless its job is set aside; a transaction that still holds the job is ended."""
        # A worker that stopped as planned gave back all its runs, except jobs that were locked at that moment.
        loss = None if held.has_left else Loss(LossKind(held.loss_kind), held.ident, held.pid, silent_s=held.silent_s)
        with self._sweep.aside.by_itself("rescue", held.job_id) as may:
            if may and recovery.rescue(
                self._runtime,
                held.job_id,
                run_no=held.run_no,
                worker_id=held.worker_id,
                loss=loss,
                has_begun=held.pid is not None,
            ):
                report["rescued"] += 1
            elif may:
                recovery.end_holder(self._runtime, held.job_id)

"""Takes runs from workers that died: a job's run is rescued, and a durable task follows its `on_lost`."""

from __future__ import annotations

from typing import Any

from ...model.crash_points import reach
from ...model.loss import Loss, LossKind
from ...operations import durable_locks, recovery
from ...store import workers
from ...store.outbox import holds
from ..duty import Count, Report
from .sweep import Sweep, SweepDuty


class LostRuns(SweepDuty):
    """Takes all runs that dead workers hold, one job per transaction, and forgets the workers that hold none.

    Once per lease it also finds the runs of forgotten workers: their claim waited for a lock while the worker died.
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
        while taken := durable_locks.take_from_the_dead(self._runtime):
            report["tasks_taken"] += taken
        if self._sweep.has_dead:
            workers.forget_dead(self._connections)

    def _rescue(self, held: Any, report: Report) -> None:
        """Rescue a lost run, unless its job is set aside; from a transaction that holds the job it is torn away."""
        # A worker that left by itself gave back all it held, except jobs that were locked at that moment.
        loss = None if held.has_left else Loss(LossKind(held.loss_kind), held.ident, held.pid, silent_s=held.silent_s)
        with self._sweep.aside.by_itself("rescue", held.job_id) as may:
            if may and recovery.rescue(
                self._runtime, held.job_id, run_no=held.run_no, worker_id=held.worker_id, loss=loss
            ):
                report["rescued"] += 1
            elif may:
                recovery.end_holder(self._runtime, held.job_id)

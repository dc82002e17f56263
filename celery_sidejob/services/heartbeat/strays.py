"""Rescues runs that this worker holds and has not been running for a while."""

from __future__ import annotations

import time

from ...model.loss import Loss, LossKind
from ...store.outbox import holds
from ...store.outbox.kinds import JOBS
from ..duty import Report
from .deliveries import GRACE_S
from .worker import Worker, WorkerDuty


class Strays(WorkerDuty):
    """Looks for such runs once per lease, and after the death of a process."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.interval_s = self._runtime.settings.lease
        self.due_at = time.monotonic() + self.interval_s

    def is_due(self) -> bool:
        """Tell whether it is time; not while a run that this worker stopped is still to be ended."""
        return not self._worker.errands.waiting and super().is_due()

    def _do(self, report: Report) -> None:
        for row in holds.held_by(self._connections, JOBS, self._worker.worker_id, older_than_s=GRACE_S):
            if row.old and not self._worker.runs.knows((row.job_id, row.run_no)):
                taken = self._rescue(row, Loss(LossKind.DROPPED, self._worker.ident))
                report["rescued"] += taken
                if not taken:  # its job is locked just now, or it has ended after all
                    self.due_at = float("-inf")

"""Rescues runs whose body did not renew its own lease in time, and ends their processes."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress

from ...model.loss import Loss, LossKind
from ...store.outbox import holds
from ..duty import Report
from .worker import WorkerDuty

logger = logging.getLogger("celery_sidejob")


class Overdue(WorkerDuty):
    """Looks at the runs that renew their own lease, if there are any."""

    def _do(self, report: Report) -> None:
        runs = self._worker.runs
        leases = runs.own_leases()
        if not leases:
            return
        for row in holds.overdue(self._connections, leases, worker_id=self._worker.worker_id):
            logger.warning("Run %d of job %d did not renew its lease in time", row.run_no, row.job_id)
            loss = Loss(LossKind.OVERDUE, self._worker.ident, row.pid)
            report["rescued"] += self._rescue(row, loss)
            runs.stopped((row.job_id, row.run_no))
            if row.pid != os.getpid():  # a thread cannot be ended; its commit will be refused
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)

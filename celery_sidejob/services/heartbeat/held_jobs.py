"""Rescues runs of jobs that this worker holds and does not run, or no longer runs."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress

from ...model.crash_points import reach
from ...model.loss import Loss, LossKind
from ...operations import recovery
from ...store.outbox import checks, holds
from ...store.outbox.kinds import JOBS
from ..duty import Report
from .deliveries import ENDED, GRACE_S
from .worker import Worker, WorkerDuty

logger = logging.getLogger("celery_sidejob")


class HeldJobs(WorkerDuty):
    """Rescues the runs of processes that died, claimed or about to be.

    Once per lease, and after the death of a process, it also rescues runs that are held but not run.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.died: dict[int, Loss] = {}
        """Processes that died and whose runs are not all rescued yet, each with how its runs were lost."""
        self._strays_at = time.monotonic() + self._runtime.settings.lease

    def _do(self, report: Report) -> None:
        for pid in sorted(self.died):
            self._rescue_orphans(pid, report)
        # Not while a run that this worker stopped is still to be ended.
        if not self._worker.errands.waiting and time.monotonic() >= self._strays_at:
            self._rescue_strays(report)

    def _rescue_orphans(self, pid: int, report: Report) -> None:
        reach("rescue:before")
        worker_id, runs = self._worker.worker_id, self._worker.runs
        held = [row for row in holds.held_by(self._connections, JOBS, worker_id) if row.pid == pid]
        plans = [(row, runs.plan_of((row.job_id, row.run_no))) for row in held]
        plans = [(row, plan) for row, plan in plans if plan != ENDED]
        rescued_before = report["orphans"]
        for row, plan in plans:
            if plan is None:
                report["orphans"] += self._rescue(row, self.died[pid])
                continue
            with self._worker.aside.by_itself("rescue", row.job_id) as may:
                if may:  # the worker stops the process because it is stopping itself
                    report["orphans"] += recovery.release(
                        self._runtime, row.job_id, run_no=row.run_no, worker_id=worker_id
                    )
        if report["orphans"] - rescued_before < len(plans):
            return  # another transaction has one of the jobs locked: tried again at the next look
        del self.died[pid]
        for key in runs.of_process(pid):
            # If it died before its claim, its acknowledged message is published again.
            checks.hasten(self._connections, JOBS, [key])
        self._strays_at = float("-inf")

    def _rescue_strays(self, report: Report) -> None:
        self._strays_at = time.monotonic() + self._runtime.settings.lease
        for row in holds.held_by(self._connections, JOBS, self._worker.worker_id, older_than_s=GRACE_S):
            if row.old and not self._worker.runs.knows((row.job_id, row.run_no)):
                taken = self._rescue(row, Loss(LossKind.DROPPED, self._worker.ident))
                report["rescued"] += taken
                if not taken:  # its job is locked just now, or it has ended after all
                    self._strays_at = float("-inf")


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

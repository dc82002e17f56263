"""Rescues the runs of pool processes that died, one job per transaction."""

from __future__ import annotations

from ...model.crash_points import reach
from ...model.loss import Loss
from ...operations import recovery
from ...store.outbox import checks, holds
from ...store.outbox.kinds import JOBS
from ..duty import Report
from .deliveries import ENDED
from .strays import Strays
from .worker import Worker, WorkerDuty


class Orphans(WorkerDuty):
    """Rescues the runs of dead processes, claimed or about to be; then has other runs held but not run looked for."""

    def __init__(self, worker: Worker, strays: Strays) -> None:
        super().__init__(worker)
        self.died: dict[int, Loss] = {}
        """Processes that died and whose runs are not all rescued yet, each with how its runs were lost."""
        self._strays = strays

    def _do(self, report: Report) -> None:
        for pid in sorted(self.died):
            self._rescue_all(pid, report)

    def _rescue_all(self, pid: int, report: Report) -> None:
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
        self._strays.due_at = float("-inf")

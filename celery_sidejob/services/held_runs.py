"""What a worker holds in the store and does not run, or no longer: its runs are rescued, one job per transaction."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..model.crash_points import reach
from ..operations import recovery
from ..operations.runtime import Runtime
from ..store import claims, messages
from .errands import Errands
from .runs_here import ENDED, GRACE_S, Key, RunsHere
from .set_aside import SetAside

logger = logging.getLogger("celery_sidejob")


class HeldRuns:
    """Compares what one worker holds with what it runs. `worker_id`: its identity just now."""

    def __init__(
        self, runtime: Runtime, runs: RunsHere[Key], errands: Errands, *, worker_id: Callable[[], int]
    ) -> None:
        self._runtime = runtime
        self._runs = runs
        self._errands = errands
        self._worker_id = worker_id
        self._died: set[int] = set()
        """Processes of the pool that died and whose runs are not all rescued yet."""
        self._reconciled_at = time.monotonic()
        self._look_again = False
        self._aside = SetAside()

    def rescue_orphans(self, died: Iterable[int]) -> int:
        """Rescue the runs of processes that died, and of those that are not all rescued yet; return how many."""
        self._died.update(died)
        return sum(self._rescue(pid) for pid in sorted(self._died))

    def reconcile(self) -> int:
        """Rescue what is held and not run, if it is time to look, and what did not renew its lease; return how many."""
        rescued = self._rescue_strays() if self._is_time() else 0
        return rescued + self._cancel_overdue()

    def _rescue(self, pid: int) -> int:
        """Rescue what a process of the pool that died was running, or was about to claim."""
        reach("rescue:before")
        worker_id = self._worker_id()
        held = [row for row in claims.held_by(self._runtime.connections, worker_id) if row.pid == pid]
        plans = [(row, self._runs.plan_of((row.job_id, row.run_no))) for row in held]
        plans = [(row, plan) for row, plan in plans if plan != ENDED]
        freed = 0
        for row, plan in plans:
            with self._aside.by_itself("rescue", row.job_id) as may:
                if may and plan is None:
                    freed += self._rescue_own(row, worker_id)
                elif may:  # the worker stops the process, because it stops itself
                    freed += recovery.release(self._runtime, row.job_id, run_no=row.run_no, worker_id=worker_id)
        if freed < len(plans):
            return freed  # somebody has one of the jobs locked just now: tried again at the next look
        self._died.discard(pid)
        for job_id, run_no in self._runs.of_process(pid):
            # If it died before its claim, its message, acknowledged already, is rung again.
            messages.hasten(self._runtime.connections, job_id, run_no)
        self._look_again = True
        return freed

    def _cancel_overdue(self) -> int:
        """Rescue runs whose body should have renewed their lease by itself, and end their process."""
        leases = self._runs.own_leases()
        if not leases:
            return 0
        taken, worker_id = 0, self._worker_id()
        for row in claims.overdue(self._runtime.connections, leases, worker_id=worker_id):
            logger.warning("Run %d of job %d did not renew its lease in time", row.run_no, row.job_id)
            with self._aside.by_itself("rescue", row.job_id) as may:
                taken += may and self._rescue_own(row, worker_id)
            self._runs.stopped((row.job_id, row.run_no))
            if row.pid != os.getpid():  # a thread cannot be ended; its commit will be refused
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)
        return taken

    def _is_time(self) -> bool:
        # Only after a death here, and otherwise once per lease.
        if self._errands.waiting:
            return False  # runs that this worker stopped are still to be ended
        self._runs.sweep()
        return self._look_again or time.monotonic() - self._reconciled_at > self._runtime.settings.lease

    def _rescue_strays(self) -> int:
        """Rescue what this worker holds and has not been running for a while."""
        self._look_again = False
        self._reconciled_at = time.monotonic()
        rescued, worker_id = 0, self._worker_id()
        for row in claims.held_by(self._runtime.connections, worker_id, older_than_s=GRACE_S):
            if row.old and not self._runs.knows((row.job_id, row.run_no)):
                taken = False
                with self._aside.by_itself("rescue", row.job_id) as may:
                    taken = may and self._rescue_own(row, worker_id)
                rescued += taken
                self._look_again |= not taken  # locked just now, or ended after all
        return rescued

    def _rescue_own(self, row: Any, worker_id: int) -> bool:
        return recovery.rescue(self._runtime, row.job_id, run_no=row.run_no, worker_id=worker_id, own=True)

"""Runs of jobs that a worker holds: claimed in pages and ended in pages, given back, or rescued if nobody runs them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from ...model.crash_points import reach
from ...model.errors import LeaseLostError, StoreUnavailableError
from ...model.events import LeaseLost
from ...model.loss import Loss, LossKind
from ...operations import recovery, run_pages
from ...operations.run_pages import Claimed
from ...store.claims import Owed
from ...store.errors import RowsLocked
from ...store.outbox import checks, holds
from ...store.outbox.kinds import JOBS
from ..duty import Report
from .deliveries import ENDED, GRACE_S, RunKey
from .quiet_ends import Page, QuietEnd, QuietEnds
from .worker import Worker, WorkerDuty

logger = logging.getLogger("celery_sidejob")


class HeldJobs(WorkerDuty):
    """Claims and ends runs in pages; rescues the runs of processes that died, claimed or about to be.

    Once per lease, and after the death of a process, it also rescues runs that are held but not run.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.died: dict[int, Loss] = {}
        """Processes that died and whose runs are not all rescued yet, each with how its runs were lost."""
        self._strays_at = time.monotonic() + self._runtime.settings.lease
        self.ends = QuietEnds(
            worker.runtime.store.called("ends-of-jobs"), self._claim,
            lambda end: worker.errands.soon(partial(self._end, end)),
        )  # fmt: skip
        """The ends of runs that the worker is to write, mostly with the next runs that it claims."""

    def claim(self, owed: Collection[Owed]) -> dict[RunKey, Claimed]:
        """Claim the runs of a page, and write the ends that wait; returns the runs that are claimed now."""
        with self.ends.page() as ends:
            return self._claim(ends, owed)

    def disconnected(self, begins: Callable[[object], bool]) -> None:
        """Give back what was claimed and has not begun: the worker drops that with its connection to the broker.

        All but the requests of which `begins` says that their runs begin here all the same.
        """
        self.give_back(*self._worker.runs.disconnected(begins))

    def give_back(self, *claimed: Claimed) -> None:
        """Give back runs that this worker has claimed, and will not begin."""
        for one in claimed:
            self._worker.errands.soon(partial(self._undo, one))

    def doubt(self) -> None:
        """Have what is held and not run looked for soon: the answer to a statement that claims runs was lost."""
        self._strays_at = min(self._strays_at, time.monotonic() + GRACE_S)

    def leave(self) -> int:
        """Write the ends that are left, and give back every run held: this worker stops, and so has its pool."""
        self.ends.write()
        with suppress(RowsLocked):
            self._worker.errands.run_once()  # ends that could not be written in a page
        begun, given_back = self._worker.runs.begun(), 0
        for row in holds.held_by(self._connections, JOBS, self._worker.worker_id):
            has_begun = row.pid is not None or (row.job_id, row.run_no) in begun
            free = recovery.release if has_begun else partial(recovery.undo, wait=False)
            given_back += free(self._worker.runtime, row.job_id, run_no=row.run_no, worker_id=self._worker.worker_id)
        return given_back

    def _do(self, report: Report) -> None:
        for pid in sorted(self.died):
            self._rescue_orphans(pid, report)
        # Not while a run that this worker stopped is still to be ended.
        if not self._worker.errands.waiting and time.monotonic() >= self._strays_at:
            self._rescue_strays(report)

    def _rescue_orphans(self, pid: int, report: Report) -> None:
        reach("rescue:before")
        worker_id, runs = self._worker.worker_id, self._worker.runs
        begun = runs.running_in(pid)
        held = [
            row
            for row in holds.held_by(self._connections, JOBS, worker_id)
            # The row of a run that was claimed in a page does not say which process has it.
            if row.pid == pid
            or (row.pid is None and (key := (row.job_id, row.run_no)) in begun and not self.ends.has(key))
        ]
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
            key = row.job_id, row.run_no
            if row.old and not self._worker.runs.knows(key) and not self.ends.has(key):
                loss = Loss(LossKind.DROPPED, self._worker.ident)
                taken = self._rescue(row, loss, has_begun=row.pid is not None)
                report["rescued"] += taken
                if not taken:  # its job is locked just now, or it has ended after all
                    self._strays_at = float("-inf")

    def _claim(self, ends: Page, owed: Collection[Owed] = ()) -> dict[RunKey, Claimed]:
        found, ended = run_pages.claim_page(self._runtime, owed, worker_id=self._worker.worker_id, over=ends.runs)
        rows = {row.id: row for row in ended}
        ends.over = rows.keys()
        for end in ends.written:
            run_pages.follow_end(self._runtime, end.content(), rows[end.key[0]])
        return found

    def _undo(self, claimed: Claimed) -> None:
        job_id, run_no = claimed.hold().key
        recovery.undo(self._runtime, job_id, run_no=run_no, worker_id=claimed.worker_id)

    def _end(self, end: QuietEnd) -> None:
        """Write an end that could not be written in a page."""
        hold = end.content()
        try:
            run_pages.end_alone(self._runtime, hold, is_unknown=end.is_unknown)
        except StoreUnavailableError:
            raise  # it is tried again
        except LeaseLostError as error:
            logger.warning("%s", error)
            self._runtime.observer.tell(LeaseLost(hold.job_id, hold.row.task, hold.run_no))
        except Exception:
            self.ends.written(end)  # else the job would stay in this run for ever
            raise
        self.ends.written(end)


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

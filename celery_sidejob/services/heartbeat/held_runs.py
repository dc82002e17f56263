"""Runs of jobs and of durable tasks that a worker holds: their ends in pages, and what is given back or rescued."""

from __future__ import annotations

import os
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from ...model.crash_points import reach
from ...model.durable import NOWHERE, Address, Content, Death, Held, Key
from ...model.errors import LeaseLostError, StoreUnavailableError
from ...model.events import LeaseLost
from ...model.logger import logger
from ...model.loss import Loss, LossKind
from ...model.protocols import Rider
from ...operations.ledger import burials, durable_ends, durable_runs
from ...operations.runs import recovery, run_pages
from ...operations.runs.run_pages import Claimed, RunKey
from ...store.broker import holds as broker_holds
from ...store.claims import Owed
from ...store.errors import OutcomeUnknown, RowsLocked, first_line, will_be_refused_again
from ...store.outbox import holds, publishing
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ...store.results import BRIEFLY_S
from ..duty import Report
from .deliveries import ENDED, GRACE_S, RELEASED, Deliveries
from .run_ends import Page, QuietEnd, QuietEnds, Stop, end_from_outside
from .worker import Worker, WorkerDuty

PAGE = 1000
"""Messages sent again per look."""
REFUSED = "The run ended well, and that cannot be stored ({}). The log of its worker has both."
Lost = tuple[Any, Loss]
"""The row of a run that is held, and how the run was lost."""


class HeldRuns(WorkerDuty):
    """Takes back the runs of processes that died, except those that the parent stopped and ends itself.

    Once per lease, and after the death of a process, it also takes back runs that are held but not run.
    """

    kind: ClassVar[Kind]

    def __init__(self, worker: Worker, runs: Deliveries[Any], *, ends: str) -> None:
        super().__init__(worker)
        self.runs = runs
        self.died: dict[int, Loss] = {}
        """Processes that died and whose runs are not all given back yet, each with how its runs were lost."""
        self.ends = QuietEnds(
            worker.runtime.store.called(ends),
            self._write_ends,
            lambda end: worker.errands.soon(partial(self._end, end)),
        )
        """The ends of runs that the worker is to write, mostly with the next runs that it holds."""
        self._strays_at = time.monotonic() + self._runtime.settings.lease

    def disconnected(self, begins: Callable[[object], bool]) -> None:
        """Give back what is held and has not begun: the worker drops that with its connection to the broker.

        A request whose run begins here all the same, as `begins` tells, is kept.
        """
        self.doubt()
        self.unhold(*self.runs.disconnected(begins))

    def doubt(self) -> None:
        """Have what is held and not run looked for soon: the answer to a statement that holds rows was lost."""
        self._strays_at = min(self._strays_at, time.monotonic() + GRACE_S)

    @abstractmethod
    def unhold(self, *held: Any) -> None:
        """Have runs given back soon that this worker holds, and will not begin.

        If the worker dies before that, other workers give back all that it held.
        """

    def leave(self) -> int:
        """Write the ends that are left, and give back every run held: this worker stops, and so has its pool."""
        self.ends.write()
        with suppress(RowsLocked):
            self._worker.errands.run_once()  # ends that could not be written in a page
        return sum(self._take([(row, self._stopped) for row in self._held()]))

    def _do(self, report: Report) -> None:
        if self.died:
            self._take_orphans(report)
        if not self.died and time.monotonic() >= self._strays_at:
            self._take_strays(report)

    def _take_orphans(self, report: Report) -> None:
        reach("rescue:before")
        begun = {key: loss for pid, loss in self.died.items() for key in self.runs.running_in(pid)}
        orphans = [
            (row, loss)
            for row in self._held()
            # The row of a run that was held in a page does not say which process has it.
            if (loss := self.died.get(row.pid) if row.pid else begun.get(_key(row))) and not self.ends.has(_key(row))
        ]
        if not self._take_all(orphans, report, "orphans"):
            return  # another transaction has one of the rows locked: tried again at the next look
        gone = [key for pid in self.died for key in self.runs.of_process(pid)]
        if gone:  # if one died before it had begun, its message may be acknowledged, and is published again
            publishing.hasten(self._connections, self.kind, gone)
        self.died.clear()
        self._strays_at = float("-inf")

    def _take_strays(self, report: Report) -> None:
        """Take back runs that this worker holds and has not been running for a while."""
        self._strays_at = time.monotonic() + self._runtime.settings.lease
        self.runs.sweep()
        dropped = Loss(LossKind.DROPPED, self._worker.ident)
        strays = [
            (row, dropped)
            for row in self._held(GRACE_S)
            if row.old and not self.runs.knows(_key(row)) and not self.ends.has(_key(row))
        ]
        if not self._take_all(strays, report, "rescued"):
            self._strays_at = float("-inf")  # a row is locked just now, or its run has ended after all

    def _take_all(self, rows: Iterable[Lost], report: Report, count: str) -> bool:
        """Take back runs, except those that this worker ends itself; tell whether it could take all of them."""
        plans = ((row, loss, self.runs.plan_of(_key(row))) for row, loss in rows)
        lost = [(row, self._stopped if plan == RELEASED else loss) for row, loss, plan in plans if plan != ENDED]
        before = report[count]
        for taken in self._take(lost):
            report[count] += taken
        return report[count] - before == len(lost)

    @abstractmethod
    def _take(self, lost: Sequence[Lost]) -> Iterator[int]:
        """Take back runs; yields how many were taken, as often as it commits."""

    @abstractmethod
    def _write_ends(self, page: Page) -> object:
        """Write a page of ends that go with no hold."""

    def _end(self, end: QuietEnd) -> None:
        try:
            self._end_or_refuse(end)
        except StoreUnavailableError as error:
            end.is_unknown |= isinstance(error, OutcomeUnknown)
            raise  # it is tried again
        except Exception:
            self.ends.written(end)  # else its row would stay held for ever
            raise
        self.ends.written(end)

    def _end_or_refuse(self, end: QuietEnd) -> None:
        try:
            with self._runtime.connections.talking(locked_s=BRIEFLY_S):
                self._end_alone(end)
        except Exception as error:
            if not will_be_refused_again(error):
                raise
            logger.exception("A run has ended well, and the store refuses that end")
            self._refuse(end, REFUSED.format(first_line(error)))

    @abstractmethod
    def _end_alone(self, end: QuietEnd) -> None:
        """Write an end that could not be written in a page."""

    @abstractmethod
    def _refuse(self, end: QuietEnd, why: str) -> None:
        """Have a run fail whose end the store refuses, so that it is not repeated."""

    @property
    def _stopped(self) -> Loss:
        return Loss(LossKind.STOPPED, self._worker.ident)

    def _held(self, older_than_s: float = 0) -> Sequence[Any]:
        return holds.held_by(self._connections, self.kind, self._worker.worker_id, older_than_s=older_than_s)


class HeldJobs(HeldRuns):
    """The runs of jobs: claimed in pages and ended in pages, each given back or rescued in a transaction of its own."""

    kind = JOBS

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, worker.runs, ends="ends-of-jobs")

    def claim(self, owed: Collection[Owed]) -> dict[RunKey, Claimed]:
        """Claim the runs of a page, and write the ends that wait; returns the runs that are claimed now."""
        return self.ends.go_with(partial(self._write_ends, owed=owed))

    def unhold(self, *held: Claimed) -> None:
        """Adds that each is given back in a transaction of its own."""
        for claimed in held:
            self._worker.errands.soon(partial(self._undo, claimed))

    def _take_strays(self, report: Report) -> None:
        if not self._worker.errands.waiting:  # a run that this worker stopped may still have to be ended
            super()._take_strays(report)

    def _take(self, lost: Sequence[Lost]) -> Iterator[int]:
        begun = self.runs.begun()
        for row, loss in lost:
            has_begun = row.pid is not None or _key(row) in begun
            if loss.kind != LossKind.STOPPED:
                yield self._rescue(row, loss, has_begun=has_begun)
                continue
            free = recovery.release if has_begun else partial(recovery.undo, wait=False)
            with self._worker.aside.by_itself("rescue", row.id) as may:
                if may:
                    yield free(self._runtime, row.id, run_no=row.number, worker_id=self._worker.worker_id)

    def _write_ends(self, page: Page, owed: Collection[Owed] = ()) -> dict[RunKey, Claimed]:
        """Write a page of ends, and claim runs in the same statement."""
        found, ended = run_pages.claim_page(self._runtime, owed, worker_id=self._worker.worker_id, over=page.runs)
        rows = {row.id: row for row in ended}
        page.over = rows.keys()
        for end in page.written:
            run_pages.follow_end(self._runtime, end.content(), rows[end.key[0]])
        return found

    def _undo(self, claimed: Claimed) -> None:
        job_id, run_no = claimed.hold().key
        recovery.undo(self._runtime, job_id, run_no=run_no, worker_id=claimed.worker_id)

    def _end_alone(self, end: QuietEnd) -> None:
        hold = end.content()
        try:
            run_pages.end_alone(self._runtime, hold, end.over.run[2], is_unknown=end.is_unknown)
        except LeaseLostError as error:
            logger.warning("%s", error)
            self._runtime.observer.tell(LeaseLost(hold.job_id, hold.row.task, hold.run_no))

    def _refuse(self, end: QuietEnd, why: str) -> None:
        stop = Stop("InvalidValueError", why)
        end_from_outside(self._runtime, end.key, None, stop, worker_id=end.content().worker_id)


class HeldTasks(HeldRuns):
    """The runs of ordinary durable tasks: given back in pages, to run again or to be buried.

    At once it has messages sent again that were dropped here while the store was unavailable.
    """

    kind = TASKS

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, Deliveries[Key](), ends="ends")
        self._missed: set[Key] = set()

    def fail(
        self,
        key: Key,
        death: Death,
        *,
        address: Address = NOWHERE,
        content: Content | None = None,
        riders: Sequence[Rider] = (),
    ) -> None:
        """Bury a task whose fate this worker's parent process decides, whether or not its run had begun.

        Raises RowsLocked, to be tried again, if a transaction has locked the row or a result among `riders` for long.
        """
        bury = partial(
            burials.fail,
            self._runtime,
            key,
            death,
            by="worker",
            worker_id=self._worker.worker_id,
            address=address,
            content=content,
        )
        with self._runtime.connections.talking(locked_s=BRIEFLY_S):
            try:
                bury(riders=riders)
            except Exception as error:
                if not (riders and will_be_refused_again(error)):
                    raise
                logger.exception("The store refuses the result of task %s, which is buried without it", key[0])
                bury()

    def revoke(self, key: Key) -> None:
        """Have the sweeper bury a task known here to be revoked: whoever waits for its result is told once."""
        burials.revoke(self._runtime, [key[0]])

    def unhold(self, *held: Held) -> None:
        """Adds that it does so in one statement."""
        if held:
            self._worker.errands.soon(partial(durable_runs.unhold, self._runtime, held))

    def leave(self) -> int:
        """Adds that what was dropped is sent again."""
        self._send_again()
        return super().leave()

    def _do(self, report: Report) -> None:
        self._send_again()
        super()._do(report)

    def _send_again(self) -> None:
        self._missed.update(self.runs.missed())
        if self._missed:
            page = list(islice(self._missed, PAGE))
            publishing.hasten(self._connections, TASKS, page)
            self._missed.difference_update(page)

    def _take(self, lost: Sequence[Lost]) -> Iterator[int]:
        """Take back runs. What was locked too late was never begun, nor was what nobody here runs: that is no loss."""
        fates: dict[tuple[Loss, bool], list[str]] = {}
        for row, loss in lost:
            begun = not self.runs.is_left(_key(row), row.pid)
            begun = begun and (row.pid is not None or loss.kind != LossKind.DROPPED)
            fates.setdefault((loss, begun), []).append(row.id)
        for (loss, begun), ids in fates.items():
            yield durable_runs.give_back(self._runtime, ids, worker_id=self._worker.worker_id, loss=loss, begun=begun)

    def _write_ends(self, page: Page) -> None:
        remove = partial(broker_holds.remove, runs=page.runs)
        page.over = self._connections.transact("durable-end", remove, single=True)

    def _end_alone(self, end: QuietEnd) -> None:
        durable_ends.end_held(self._runtime, end.over, end.content(), is_unknown=end.is_unknown)

    def _refuse(self, end: QuietEnd, why: str) -> None:
        loss = Loss(LossKind.REFUSED, self._worker.ident, cause=why)
        durable_runs.doom(self._runtime, end.over.run, end.content(), loss)


class Overdue(WorkerDuty):
    """Looks at the runs that renew their own lease, if there are any."""

    def _do(self, report: Report) -> None:
        runs = self._worker.runs
        leases = runs.own_leases()
        if not leases:
            return
        for row in holds.overdue(self._connections, leases, worker_id=self._worker.worker_id):
            logger.warning("Run %d of job %d did not renew its lease in time", row.number, row.id)
            loss = Loss(LossKind.OVERDUE, self._worker.ident, row.pid)
            report["rescued"] += self._rescue(row, loss)
            runs.stopped(_key(row))
            if row.pid != os.getpid():  # a thread cannot be ended; its commit will be refused
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)


def _key(row: Any) -> tuple[Any, int]:
    """Return the key of the run that a row is held by: (job id, run number) or (task id, generation)."""
    return row.id, row.number

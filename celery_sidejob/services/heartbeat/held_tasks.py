"""Ordinary durable tasks that a worker holds but does not run, or no longer runs: they run again, or are buried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ...model.crash_points import reach
from ...model.durable import NOWHERE, Address, Content, Death, Held, Key
from ...model.errors import StoreUnavailableError
from ...model.loss import Loss, LossKind
from ...operations import burials, durable_ends, durable_locks, revocation
from ...store.broker import holds as broker_holds
from ...store.outbox import checks, holds
from ...store.outbox.kinds import TASKS
from ..duty import Report
from .deliveries import ENDED, GRACE_S, RELEASED, Deliveries
from .quiet_ends import SOON_S, UNFETCHED_S, Page, QuietEnd, QuietEnds
from .worker import Worker, WorkerDuty

PAGE = 1000
"""Messages sent again per look."""


class HeldTasks(WorkerDuty):
    """Gives back the runs of processes that died, except those that the parent stopped and ends itself.

    Once per lease it also gives back tasks that are held but not run. At once it has messages sent again that were
    dropped here while the store was unavailable.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.runs: Deliveries[Key] = Deliveries()
        self.died: dict[int, Loss] = {}
        """Processes that died and whose runs are not all given back yet, each with how its runs were lost."""
        self.ends = QuietEnds(
            worker.runtime.store.called("ends"), self._write_ends,
            lambda end: worker.errands.soon(partial(self._end, end)),
            wait_s=UNFETCHED_S if self._connections.is_broker else SOON_S,
        )  # fmt: skip
        """The ends of runs that the worker is to write with its next fetch."""
        self._missed: set[Key] = set()
        self._reconciled_at = time.monotonic()

    def fail(self, key: Key, death: Death, *, address: Address = NOWHERE, content: Content | None = None) -> None:
        """Bury a task whose fate this worker's parent process decides, whether or not its run had begun."""
        burials.fail(
            self._runtime, key, death, by="worker", worker_id=self._worker.worker_id, address=address, content=content
        )

    def revoke(self, key: Key) -> None:
        """Have the sweeper bury a task known here to be revoked: whoever waits for its result is told once."""
        revocation.revoke(self._runtime, [key[0]])

    def disconnected(self, begins: Callable[[object], bool]) -> None:
        """Have given back what was fetched and not begun: the worker drops that with its connection.

        All but the requests of which `begins` says that their runs begin here all the same.
        """
        self.doubt()
        self.unhold(*self.runs.disconnected(begins))

    def doubt(self) -> None:
        """Have what is held and not run looked for soon: the answer to a statement that holds rows was lost."""
        soon = time.monotonic() + GRACE_S - self._runtime.settings.lease
        self._reconciled_at = min(self._reconciled_at, soon)

    def unhold(self, *runs: Held) -> None:
        """Have rows given back that this worker holds since it has fetched their messages, and will not begin."""
        if runs:
            self._worker.errands.soon(partial(durable_locks.unhold, self._runtime, runs))

    def leave(self) -> int:
        """Give back every task held, and have sent again what was left: this worker stops."""
        self.ends.write()
        self._send_again()
        return self._give_back((row, self._stopped) for row in self._held())

    def _do(self, report: Report) -> None:
        self._send_again()
        if self.died:
            report["orphans"] += self._take_orphans()
            return
        if time.monotonic() - self._reconciled_at > self._runtime.settings.lease:
            report["orphans"] += self._take_strays()

    def _take_orphans(self) -> int:
        reach("rescue:before")
        begun = {key: loss for pid, loss in self.died.items() for key in self.runs.running_in(pid)}
        held = [
            (row, loss)
            for row in self._held()
            # The row of a run that was held at the fetch does not say which process has it.
            if (loss := self.died.get(row.pid) if row.pid else begun.get((row.task_id, row.generation)))
            and not self.ends.has((row.task_id, row.generation))
        ]
        taken = self._take(held)
        if taken < len([row for row, _ in held if self.runs.plan_of((row.task_id, row.generation)) != ENDED]):
            return taken  # another transaction has one of the rows locked: tried again at the next look
        for pid in self.died:
            self.runs.of_process(pid)
        self.died.clear()
        return taken

    def _send_again(self) -> None:
        self._missed.update(self.runs.missed())
        if self._missed:
            page = list(islice(self._missed, PAGE))
            checks.hasten(self._connections, TASKS, page)
            self._missed.difference_update(page)

    def _take(self, rows: Iterable[tuple[Any, Loss]]) -> int:
        plans = ((row, loss, self.runs.plan_of((row.task_id, row.generation))) for row, loss in rows)
        stopped = self._stopped
        return self._give_back(
            (row, stopped if plan == RELEASED else loss) for row, loss, plan in plans if plan != ENDED
        )

    @property
    def _stopped(self) -> Loss:
        return Loss(LossKind.STOPPED, self._worker.ident)

    def _give_back(self, rows: Iterable[tuple[Any, Loss]]) -> int:
        """Give rows back. What was locked too late was never begun, nor was what nobody here runs: that is no loss."""
        fates: dict[tuple[Loss, bool], list[str]] = {}
        for row, loss in rows:
            begun = not self.runs.is_left((row.task_id, row.generation), row.pid)
            begun = begun and (row.pid is not None or loss.kind != LossKind.DROPPED)
            fates.setdefault((loss, begun), []).append(row.task_id)
        return sum(
            durable_locks.give_back(self._runtime, ids, worker_id=self._worker.worker_id, loss=loss, begun=begun)
            for (loss, begun), ids in fates.items()
        )

    def _take_strays(self) -> int:
        """Give back tasks that this worker holds and has not been running for a while."""
        self._reconciled_at = time.monotonic()
        self.runs.sweep()
        rows = [(row, (row.task_id, row.generation)) for row in self._held(GRACE_S) if row.old]
        loss = Loss(LossKind.DROPPED, self._worker.ident)
        return self._take((row, loss) for row, key in rows if not self.runs.knows(key) and not self.ends.has(key))

    def _write_ends(self, page: Page) -> None:
        remove = partial(broker_holds.remove, runs=[Held(*run) for run in page.runs])
        page.over = self._connections.transact("durable-end", remove, single=True)

    def _end(self, end: QuietEnd) -> None:
        try:
            durable_ends.end_held(self._runtime, Held(*end.held), end.content(), is_unknown=end.is_unknown)
        except StoreUnavailableError:
            raise  # it is tried again
        except Exception:
            self.ends.written(end)  # else its row would stay held for ever
            raise
        self.ends.written(end)

    def _held(self, older_than_s: float = 0) -> Sequence[Any]:
        return holds.held_by(self._connections, TASKS, self._worker.worker_id, older_than_s=older_than_s)

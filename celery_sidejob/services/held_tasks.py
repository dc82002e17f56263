"""What a worker holds of ordinary durable tasks and does not run, or no longer: it runs again, or is buried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from ..model.crash_points import reach
from ..model.durable import NOWHERE, Address, Content, Key
from ..operations import burials, durable_locks, revocation
from ..operations.runtime import Runtime
from ..store import durable_looks
from ..store.durable_locks import held_by
from ..store.statement import Executor
from .durable_schema import DurableSchema
from .runs_here import ENDED, GRACE_S, RELEASED, RunsHere
from .waiting_runs import WaitingRuns

PAGE = 1000
"""How many messages one look has sent again."""


class HeldTasks:
    """Compares what one worker holds with what it runs.

    `worker_id`: its identity just now; `is_busy`: whether anything runs here, of whatever kind.
    """

    def __init__(
        self, runtime: Runtime, *, worker_id: Callable[[], int], is_busy: Callable[[], bool] = lambda: True
    ) -> None:
        self.runs: RunsHere[Key] = RunsHere()
        self.keeps_revocations = False
        """Whether the store does: it may be one revision behind."""
        self._runtime = runtime
        self._worker_id = worker_id
        self._died: set[int] = set()
        self._missed: set[Key] = set()
        self._schema = DurableSchema(runtime.connections)
        self._reconciled_at = time.monotonic()
        self._waiting = WaitingRuns(runtime, self.runs, self._still_wait, is_busy)

    def vouch(self) -> int:
        """Tell the store of what was received here and waits."""
        return self._waiting.vouch()

    def fail(
        self, key: Key, *, reason: str, error: str, traceback: str | None = None, retries: int = 0,
        address: Address = NOWHERE, content: Content | None = None,
    ) -> None:  # fmt: skip
        """Bury a task of which this worker's parent process is the judge, whether its run had begun or not."""
        burials.fail(
            self._runtime, key, by="worker", worker_id=self._worker_id(), reason=reason, error=error,
            traceback=traceback, retries=retries, address=address, content=content,
        )  # fmt: skip

    def revoke(self, key: Key, *, address: Address, error: str) -> None:
        """Have a task buried that this worker knows to be revoked, by whoever sweeps: who waits is told once."""
        if revocation.revoke(self._runtime, [key[0]]) is None:
            self.fail(key, reason="revoked", error=error, address=address)

    def rescue(self, died: Iterable[int]) -> int:
        """Take the runs of processes that died, and return how many; those that the parent stopped it ends itself.

        And have messages sent again that were forgotten here while the store was away.
        """
        self._send_again()
        self._died.update(died)
        if self._died and self._schema.fits():
            reach("rescue:before")
            held = [row for row in self._held() if row.pid in self._died]
            taken = self._take(held)
            if taken < len([row for row in held if self.runs.plan_of((row.task_id, row.generation)) != ENDED]):
                return taken  # somebody has one of the rows locked just now: tried again at the next look
            # What had begun without a lock has left no trace, and its message may be acknowledged: sent again now, it
            # locks at once. So this death is not counted, further ones are.
            self._send_unlocked_again([key for pid in self._died for key in self.runs.unlocked(pid)])
            for pid in self._died:
                self.runs.of_process(pid)
            self._died.clear()
            return taken
        self._died.clear()
        return self._take_strays() if self._is_time() else 0

    def leave(self) -> int:
        """Give back all that is held: this worker stops."""
        if not self._schema.fits():
            return 0
        self._send_unlocked_again(self.runs.unlocked())
        return self._give_back((row, False) for row in self._held())

    def _send_again(self) -> None:
        self._missed.update(self.runs.missed())
        if self._missed and self._schema.fits():
            page = list(islice(self._missed, PAGE))
            durable_looks.hasten(self._runtime.connections, page)
            self._missed.difference_update(page)

    def _send_unlocked_again(self, keys: Sequence[Key]) -> None:
        if keys:
            durable_looks.send_again(self._runtime.connections, keys)

    def _take(self, rows: Iterable[Any]) -> int:
        plans = ((row, self.runs.plan_of((row.task_id, row.generation))) for row in rows)
        return self._give_back((row, plan != RELEASED) for row, plan in plans if plan != ENDED)

    def _give_back(self, rows: Iterable[tuple[Any, bool]]) -> int:
        """Give rows back, each as a loss or not. What was locked too late, for nobody, is none: it was not begun."""
        fates: dict[tuple[bool, bool], list[str]] = {}
        for row, loss in rows:
            begun = not self.runs.is_left((row.task_id, row.generation), row.pid)
            fates.setdefault((loss and begun, begun), []).append(row.task_id)
        return sum(
            durable_locks.give_back(self._runtime, ids, worker_id=self._worker_id(), loss=loss, begun=begun)
            for (loss, begun), ids in fates.items()
        )

    def _take_strays(self) -> int:
        """Take what this worker holds and has not been running for a while."""
        self._reconciled_at = time.monotonic()
        self.runs.sweep()
        if not self._schema.fits():
            return 0
        rows = [row for row in self._held(GRACE_S) if row.old]
        return self._take([row for row in rows if not self.runs.knows((row.task_id, row.generation))])

    def _still_wait(self, executor: Executor, waiting: Iterable[Key], *, wait_s: float) -> int:
        return durable_looks.still_wait(executor, waiting, wait_s=wait_s) if self._schema.fits() else 0

    def _held(self, older_than_s: float = 0) -> Sequence[Any]:
        return held_by(self._runtime.connections, self._worker_id(), older_than_s=older_than_s)

    def _is_time(self) -> bool:
        return time.monotonic() - self._reconciled_at > self._runtime.settings.lease

"""What a worker holds of ordinary durable tasks and does not run, or no longer: it runs again, or is buried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..model.crash_points import reach
from ..model.durable import Key
from ..operations import durable as operations
from ..operations.runtime import Runtime
from ..store import durable
from ..store.statement import Executor
from .runs_here import ENDED, GRACE_S, RELEASED, RunsHere
from .waiting_runs import WaitingRuns

AGAIN_S = 1.0
"""After which a run that is held and not run is looked at once more, before it is taken."""


class HeldTasks:
    """Compares what one worker holds with what it runs.

    `worker_id`: its identity just now; `is_busy`: whether anything runs here, of whatever kind.
    """

    def __init__(
        self, runtime: Runtime, *, worker_id: Callable[[], int], is_busy: Callable[[], bool] = lambda: True
    ) -> None:
        self.runs: RunsHere[Key] = RunsHere()
        self._runtime = runtime
        self._worker_id = worker_id
        self._died: set[int] = set()
        self._fits = False
        self._reconciled_at = time.monotonic()
        self._strays: set[Key] = set()
        """What was held and not run at the last look."""
        self._waiting = WaitingRuns(runtime, self.runs, self._still_wait, is_busy)

    def vouch(self) -> int:
        """Tell the store of what was received here and waits."""
        return self._waiting.vouch()

    def fail(self, key: Key, *, reason: str, error: str, traceback: str | None = None, retries: int = 0) -> None:
        """Bury a task of which this worker's parent process is the judge, whether its run had begun or not."""
        operations.fail(
            self._runtime, key, by="worker", worker_id=self._worker_id(), reason=reason, error=error,
            traceback=traceback, retries=retries,
        )  # fmt: skip

    def rescue(self, died: Iterable[int]) -> int:
        """Take the runs of processes that died, and return how many; those that the parent stopped it ends itself."""
        self._died.update(died)
        if self._died and self._is_there():
            reach("rescue:before")
            held = [row for row in self._held() if row.pid in self._died]
            taken = self._take([(row.task_id, row.generation) for row in held])
            if taken < len([row for row in held if self.runs.plan_of((row.task_id, row.generation)) != ENDED]):
                return taken  # somebody has one of the rows locked just now: tried again at the next look
            for pid in self._died:
                self.runs.of_process(pid)
            self._died.clear()
            return taken
        self._died.clear()
        return self._take_strays() if self._is_time() else 0

    def leave(self) -> int:
        """Give back all that is held: this worker stops."""
        if not self._is_there():
            return 0
        operations.hear_of_ends(self._runtime)  # what has ended is not to be given back
        ids = [row.task_id for row in self._held()]
        return operations.give_back(self._runtime, ids, worker_id=self._worker_id(), loss=False) if ids else 0

    def _take(self, keys: Iterable[Key]) -> int:
        lost: dict[bool, list[str]] = {True: [], False: []}
        for key in keys:
            plan = self.runs.plan_of(key)
            if plan != ENDED:
                lost[plan != RELEASED].append(key[0])
        return sum(
            operations.give_back(self._runtime, ids, worker_id=self._worker_id(), loss=loss)
            for loss, ids in lost.items()
            if ids
        )

    def _take_strays(self) -> int:
        """Take what this worker holds and has not been running for a while."""
        self._reconciled_at = time.monotonic()
        self.runs.sweep()
        if not self._is_there():
            return 0
        held = [(row.task_id, row.generation) for row in self._held(GRACE_S) if row.old]
        strays = {key for key in held if not self.runs.knows(key)}
        taken, self._strays = strays & self._strays, strays
        if strays - taken:
            # A process whose store was away as it ended a run goes on trying; who is quicker must not decide.
            self._reconciled_at += AGAIN_S - self._runtime.settings.lease
        return self._take(sorted(taken))

    def _still_wait(self, executor: Executor, waiting: Iterable[Key], *, wait_s: float) -> int:
        return durable.still_wait(executor, waiting, wait_s=wait_s) if self._is_there() else 0

    def _held(self, older_than_s: float = 0) -> Sequence[Any]:
        return durable.held_by(self._runtime.connections, self._worker_id(), older_than_s=older_than_s)

    def _is_there(self) -> bool:
        """Tell whether the schema knows durable tasks: it may be one revision behind."""
        if not self._fits:
            self._fits = durable.fits(self._runtime.connections)
        return self._fits

    def _is_time(self) -> bool:
        return time.monotonic() - self._reconciled_at > self._runtime.settings.lease

"""The state that the duties of one heartbeat share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...model import native
from ...model.loss import Loss
from ...operations.runs import recovery
from ...operations.runtime import Runtime
from ...store.connection.own_executor import OwnExecutor
from ..duty import Duty, Report
from ..set_aside import SetAside
from .deliveries import Deliveries, RunKey
from .errands import Errands


class Worker:
    """A worker in one store: its identity there, the connection of its thread, and the runs in progress in it.

    `is_busy` tells whether anything runs here, of any kind.
    """

    def __init__(self, runtime: Runtime, is_busy: Callable[[], bool] = lambda: True) -> None:
        self.runtime = runtime
        self.worker_id = 0
        """The worker's id in the store; 0: not registered yet."""
        self.ident = ""
        """Its name there; "": not registered yet."""
        self.is_busy = is_busy
        self.runs: Deliveries[RunKey] = Deliveries()
        self.errands = Errands(runtime.store.called("errands"))
        # Under gevent, connections to the broker belong to greenlets, and so do those of the receivers of our signals.
        self.own = replace(runtime, after_commit=self.errands.soon) if native.is_patched() else runtime
        """The runtime for the work of this worker's thread."""
        self.aside = SetAside()
        self._executor: OwnExecutor | None = None

    def executor(self) -> OwnExecutor:
        """Return this worker's own connection, which its thread uses for all its work in the store."""
        if self._executor is not None and (self._executor.broken or self._executor.dropped_within(0)):
            self.disconnect()
        if self._executor is None:
            self._executor = self.runtime.connections.connect()
        return self._executor

    def disconnect(self) -> None:
        """Close that connection, if it is open."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()


class WorkerDuty(Duty):
    """A duty of the heartbeat, done over the worker's own connection."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._runtime = worker.own
        self._connections = worker.runtime.connections

    def run_once(self, report: Report | None = None) -> Report:
        """Do the duty now and count its work."""
        with self._connections.talking(over=self._worker.executor()):
            return super().run_once(report)

    def _rescue(self, row: Any, loss: Loss, *, has_begun: bool = True) -> bool:
        """Rescue a run that this worker holds; False if its job is locked just now, or the run has ended after all."""
        taken = False
        with self._worker.aside.by_itself("rescue", row.id) as may:
            taken = may and recovery.rescue(
                self._runtime,
                row.id,
                run_no=row.number,
                worker_id=self._worker.worker_id,
                own=True,
                loss=loss,
                has_begun=has_begun,
            )
        return taken

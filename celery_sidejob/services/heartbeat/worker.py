"""A worker in one store: the state that the duties of its heartbeat share, and the errands of its event loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...model import native
from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...model.loss import Loss
from ...operations.runs import recovery
from ...operations.runs.run_pages import RunKey
from ...operations.runtime import Runtime
from ...store.connection.own_executor import OwnExecutor
from ...store.errors import RowsLocked
from ..duty import Duty, Report, SetAside
from .deliveries import Deliveries


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


WAIT_S = 0.1


class Errands:
    """Does one errand after the other: ending a revoked run waits for any transaction that has its job locked."""

    def __init__(self, name: str = "errands") -> None:
        self.name = name
        self._waiting: deque[Callable[[], None]] = deque()
        self._one_at_a_time = threading.Lock()

    def soon(self, errand: Callable[[], None]) -> None:
        """Queue `errand` for the next turn; callable from any thread and from a signal handler."""
        self._waiting.append(errand)

    @property
    def waiting(self) -> bool:
        """Whether an errand is queued or in progress."""
        return bool(self._waiting)

    def run_once(self) -> int:
        """Do the queued errands and return their number; while the store is unavailable they stay queued.

        An errand whose rows somebody's transaction has locked waits behind all others.
        """
        done, locked = 0, list[RowsLocked]()
        with self._one_at_a_time:
            while len(locked) < len(self._waiting):
                try:
                    self._waiting[0]()
                except RowsLocked as error:
                    locked.append(error)
                    self._waiting.rotate(-1)
                    continue
                except StoreUnavailableError:
                    raise
                except Exception:
                    logger.exception(
                        "Something could not be done in time; the sweeper makes up for it where the store has a trace"
                    )
                self._waiting.popleft()
                done += 1
        if locked:
            raise locked[0]
        return done

    def wait_s(self) -> float:
        """Return how long to wait."""
        return WAIT_S

    def close(self) -> None:
        """Do the errands that are left: the worker stops, and the runs it then still holds run again."""
        try:
            self.run_once()
        except StoreUnavailableError as error:
            logger.warning("Could not end runs that were revoked or took too long; they run again: %s", error)

"""The life of a worker: its identity, its heartbeat, its liveness lock, and its duties for the runs it holds.

The heartbeat is a native thread with a connection of its own, because a hub's timers die on reconnect and green threads
starve. It beats every `sidejob_heartbeat_interval`. It watches the processes of its pool every quarter of a second,
because Celery itself takes five seconds to notice that one was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...model.loss import Loss
from ...model.native import new_process_name
from ...operations.runs.run_pages import RunKey
from ...operations.runtime import Runtime
from ...store import queues, workers
from ...store.errors import unavailable_during
from ...store.outbox import publishing
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ..duty import Duties, Duty, Report
from .deliveries import Deliveries
from .held_runs import HeldJobs, HeldTasks, Overdue
from .liveness import HeartbeatFile, LivenessLock
from .pool_processes import MemoryKills, PoolProcesses
from .worker import Worker, WorkerDuty

TRY_S = 0.25
"""How often the worker that watches the sweeper tries to take its place."""
WATCH_S = 0.25
"""Seconds between two looks at the processes of the pool."""


class Heartbeat(Worker):
    """Keeps one worker alive in the store, and rescues runs that it holds but does not execute."""

    def __init__(
        self,
        runtime: Runtime,
        processes: PoolProcesses | None = None,
        file: HeartbeatFile | None = None,
        *,
        is_busy: Callable[[], bool] = lambda: True,
        check: Callable[[], None] = lambda: None,
        board: Callable[[], Mapping[int, RunKey]] = dict,
    ) -> None:
        """`check` raises if the worker must not serve the store, for example because the schema does not fit.

        `board` tells which runs processes of the pool work on, {process: run}, that their deliveries do not name.
        """
        super().__init__(runtime, is_busy)
        self.name = runtime.store.called("heartbeat")
        self._check = check
        self._board = board
        self.has_processes = processes is not None
        """Whether bodies run in processes of a pool, not in this one."""
        self._processes = processes or PoolProcesses()
        self.memory_kills = MemoryKills()
        self._file = file
        self._settings = runtime.settings
        self._lock = LivenessLock(runtime.settings, runtime.connections.setting)
        self._beat_at = float("-inf")
        self._sweep_at = float("-inf")
        self._leaves = False
        self.managed: frozenset[str] | None = None
        """The managed queues, as of the last beat; None before the first."""
        self.tasks = HeldTasks(self)
        self.jobs = HeldJobs(self)
        self._duties = Duties(
            Beat(self),
            self.jobs,
            self.tasks,
            Overdue(self),
            Prefetched(self, self.runs, JOBS),
            Prefetched(self, self.tasks.runs, TASKS),
        )

    # -- identity ------------------------------------------------------------------------------------------------

    def register(self) -> int:
        """Register this process under a new identity, with its liveness lock where the connection allows one."""
        self._check()
        _ = self.runtime.name  # asked now, because messages may name it
        with unavailable_during("register"):
            executor = self.executor()
            ident = new_process_name()
            worker_id = workers.register(executor, ident, broker=self.runtime.broker.identity)
            self._lock.take(worker_id, executor)
            self.managed = frozenset(queues.names(executor))
        # Set only now, so that a failed step above is begun again. An unused identity is found by its silence.
        self._beat_at = time.monotonic()
        self.worker_id, self.ident = worker_id, ident
        return worker_id

    @property
    def may_claim(self) -> bool:
        """Whether this worker's last beat, by its own clock, is younger than its lease."""
        return time.monotonic() - self._beat_at < self._settings.lease

    @property
    def lock_lost_at(self) -> float:
        """When this worker last lost its liveness lock, by the monotonic clock."""
        return self._lock.lost_at

    def sweep_is_due(self) -> bool:
        """Tell, every `TRY_S`, that this worker watches the sweeper; the service that asks then tries to sweep."""
        now = time.monotonic()
        if now < self._sweep_at:
            return False
        self._sweep_at = now + TRY_S
        return True

    def leave(self) -> int:
        """Give back everything that this worker holds, not counted as losses, and declare the worker gone."""
        released = 0
        if not self.worker_id:
            return released
        try:
            released += self.jobs.leave() + self.tasks.leave()
            self._leaves = True  # the loop may be in the middle of a beat, which then finds no row
            workers.drop_sweeper_lease(self.runtime.connections, self.worker_id)
            workers.leave(self.runtime.connections, self.worker_id)
        except StoreUnavailableError as error:
            logger.warning("Could not give back what this worker held; other workers notice its silence: %s", error)
        return released

    def note_board(self) -> None:
        """Note which runs the processes of the pool work on; their deliveries may name others."""
        self.runs.turned_in(self._board())

    # -- one look ------------------------------------------------------------------------------------------------

    def run_once(self) -> Report:
        """Beat if it is time, and rescue runs held but not executed, after the death of a process or without one.

        Reports `beaten`, the `orphans` rescued from processes that died, and the number of other runs `rescued`.
        """
        if self._file is not None:
            self._file.touch()  # first, because the steps below raise while the store is unavailable
        if not self.worker_id:
            self.register()  # the store was unavailable when the worker started
        if not self.errands.waiting:  # errands end runs, and need the plans of those runs until then
            self.runs.sweep()
        self.note_board()
        died = self._processes.died(self.runs.busy() | self.tasks.runs.busy())  # reports each death only once
        for pid, status in died.items():
            loss = Loss.of_process(self.ident, pid, status, out_of_memory=self.memory_kills.were_just_now())
            self.jobs.died[pid] = self.tasks.died[pid] = loss
        report = Report()
        self._duties.do(report)
        return report

    def wait_s(self) -> float:
        """Return the seconds to wait; the loss of the liveness lock ends the wait."""
        if not self._lock.held:
            return WATCH_S
        self._lock.dropped_within(WATCH_S)
        return 0.0

    def close(self) -> None:
        """Close both connections; closing its own frees the lock."""
        self._lock.close()
        self.disconnect()
        if self._file is not None:
            self._file.remove()

    # -- beating -------------------------------------------------------------------------------------------------

    @property
    def beat_is_due(self) -> bool:
        """Whether it is time to beat, or the liveness lock was lost."""
        return self._lock.lost or time.monotonic() - self._beat_at >= self._settings.heartbeat_interval

    def beat(self) -> None:
        """Beat, and take the liveness lock again if it was lost."""
        self.memory_kills.look()
        if self._is_alive() and self._lock.is_due:
            # A free lock was no proof until now. The lock is announced anew, and the beat clears any suspicion.
            self._lock.take(self.worker_id, self.executor())
            self._is_alive()

    def _is_alive(self) -> bool:
        """Beat; False if this worker had been declared dead, and has begun anew."""
        beat = workers.beat(self.executor(), self.worker_id, schema=self._settings.schema)
        if beat is None:
            self._declared_dead()
            return False
        self._beat_at = time.monotonic()
        self.managed = frozenset(beat.managed)
        self._sweep_at = min(self._sweep_at, self._beat_at) if beat.watches else float("inf")
        return True

    def _declared_dead(self) -> None:
        """Drop everything and begin anew: runs still in progress here will be refused by their fences."""
        if self._leaves:
            return
        logger.warning("Worker %s was declared dead while it was silent; its runs begin elsewhere.", self.ident)
        received = self.runs.clear()
        tasks = self.tasks.runs.clear()
        self.register()
        for key in received:
            # Runs not begun yet will be refused too, because they carry the old identity: they are published again.
            publishing.hasten(self.runtime.connections, JOBS, [key])
        if tasks:
            publishing.hasten(self.runtime.connections, TASKS, tasks)


class Beat(Duty):
    """Beats every `sidejob_heartbeat_interval`; a failed beat is tried again at once."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat

    def is_due(self) -> bool:
        """Tell whether it is time to beat."""
        return self._heartbeat.beat_is_due

    def _do(self, report: Report) -> None:
        self._heartbeat.beat()
        report["beaten"] += 1


SOON_S = 2.0
"""Seconds that a delivery has waited, at most, when the worker first vouches for it."""


class Prefetched(WorkerDuty):
    """Vouches for messages of one kind that wait here: postpones the sweeper's next check to a lease from now.

    RabbitMQ hides prefetched messages, and Redis does not say who has one. A message may wait for hours behind a long
    run. If it were called missing, its copies would pile up in the queue.

    A worker that dies, or is silent for its lease, therefore stops vouching. A worker in which nothing has been running
    for a lease (`is_busy`) stops too: its messages do not wait behind a run, the pool has lost them.
    """

    def __init__(self, worker: Worker, runs: Deliveries[Any], kind: Kind) -> None:
        super().__init__(worker)
        self._runs = runs
        self._kind = kind
        self._lease_s = self._runtime.settings.lease
        self._soon_s = min(SOON_S, self._runtime.settings.lost_after / 4)
        self._busy_at = time.monotonic()

    def _do(self, report: Report) -> None:
        if self._worker.is_busy():
            self._busy_at = time.monotonic()
        elif time.monotonic() - self._busy_at > self._lease_s:
            return
        keys = self._runs.waiting(for_s=self._soon_s, every_s=self._lease_s / 4)
        if keys:
            report["vouched"] += publishing.vouch(self._connections, self._kind, keys, wait_s=self._lease_s)

"""The life of a worker: its identity, its beat, its liveness lock, and its care for what it holds.

A native thread with a connection of its own, because a hub's timers die on reconnect and green threads starve. It
beats every `sidejob_heartbeat_interval`; it watches the processes of its pool every quarter of a second, because
Celery itself takes five seconds to notice that one was killed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..model import native
from ..model.errors import StoreUnavailableError
from ..operations import recovery
from ..operations.runtime import Runtime
from ..store import claims, durable_looks, messages, revocation, workers
from ..store.errors import unavailable_during
from ..store.own_executor import OwnExecutor
from .duties import Duties
from .errands import Errands
from .heartbeat_file import HeartbeatFile
from .held_runs import HeldRuns
from .held_tasks import HeldTasks
from .liveness_lock import LivenessLock
from .pool_processes import PoolProcesses
from .runs_here import Key, RunsHere
from .waiting_runs import WaitingRuns

logger = logging.getLogger("celery_sidejob")

WATCH_S = 0.25
"""How often the processes of the pool are looked at."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What one look did."""

    beaten: bool = False
    orphans: int = 0
    """Runs rescued from processes that died."""
    rescued: int = 0
    """Other runs that were held and not run, or did not renew their lease."""


class Heartbeat:
    """Keeps one worker alive in the store, and has what it holds and does not run rescued."""

    def __init__(
        self, runtime: Runtime, processes: PoolProcesses | None = None, file: HeartbeatFile | None = None, *,
        is_busy: Callable[[], bool] = lambda: True, check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`check` raises what keeps a worker from serving the store: a schema that does not fit, for one."""
        self.name = runtime.called("heartbeat")
        self._check = check
        self.has_processes = processes is not None
        """Whether bodies run in processes of a pool, and not in this one."""
        self.runtime = runtime
        self._processes = processes or PoolProcesses()
        self._file = file
        self._settings = runtime.settings
        self.runs: RunsHere[Key] = RunsHere()
        self.worker_id = 0
        """Under which it is entered in the store; 0: not yet."""
        self.store: str | None = None
        """The store's name, where there are several."""
        self.errands = Errands(runtime.called("errands"))
        # Connections to the broker belong to greenlets, where there are such; so do those of our signals' receivers.
        own = replace(runtime, later=self.errands.soon) if native.is_patched() else runtime
        self._held = HeldRuns(own, self.runs, self.errands, worker_id=lambda: self.worker_id)
        self._waiting = WaitingRuns(runtime, self.runs, messages.still_wait, is_busy)
        self.tasks = HeldTasks(own, worker_id=lambda: self.worker_id, is_busy=is_busy)
        self._beat: OwnExecutor | None = None
        self._lock = LivenessLock(runtime.settings, runtime.connections.setting)
        self._beat_at = float("-inf")
        self._sweep_at = float("-inf")
        self._leaves = False
        self._runs_died: set[int] = set()
        self._tasks_died: set[int] = set()
        self._beaten, self._orphans, self._rescued = False, 0, 0
        self._duties = Duties(
            self._keep_beating, self._rescue_runs, self._rescue_tasks, self._reconcile, self._vouch_for_runs,
            self._vouch_for_tasks,
        )  # fmt: skip

    # -- identity ------------------------------------------------------------------------------------------------

    def register(self) -> int:
        """Enter this process under a new identity, with its liveness lock where the connection allows one."""
        self._check()
        if self.runtime.stores.several:
            self.store = self.runtime.stores.name_of(self.runtime)
        ident = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        with unavailable_during("register"):
            executor = self._beating()
            worker_id = workers.register(executor, ident)
            self.tasks.keeps_revocations = revocation.fits(executor)
            self._lock.take(worker_id, executor)
        # Not before: what broke off above is begun anew. An identity of which nobody knows is found by its silence.
        self._beat_at = time.monotonic()
        self.worker_id = worker_id
        return worker_id

    @property
    def may_claim(self) -> bool:
        """Whether this worker has beaten within its lease, by its own clock."""
        return time.monotonic() - self._beat_at < self._settings.lease

    @property
    def lock_lost_at(self) -> float:
        """When this worker's own liveness lock fell last, by the monotonic clock."""
        return self._lock.lost_at

    def sweep_is_due(self) -> bool:
        """Tell, once, that nobody seems to sweep the schema; asked by the service that then does."""
        if time.monotonic() < self._sweep_at:
            return False
        self._sweep_at = float("inf")  # until a beat says so again
        return True

    def leave(self) -> int:
        """Give back everything this worker holds, without counting a loss, and declare it gone."""
        released = 0
        if not self.worker_id:
            return released
        try:
            for row in claims.held_by(self.runtime.connections, self.worker_id):
                released += recovery.release(self.runtime, row.job_id, run_no=row.run_no, worker_id=self.worker_id)
            released += self.tasks.leave()
            self._leaves = True  # the loop may be in the midst of a beat, which then finds no row
            workers.drop_sweeper_lease(self.runtime.connections, self.worker_id)
            workers.leave(self.runtime.connections, self.worker_id)
        except StoreUnavailableError as error:
            logger.warning("Could not give back what this worker held; it is found by its silence: %s", error)
        return released

    # -- one look ------------------------------------------------------------------------------------------------

    def run_once(self) -> Beat:
        """Beat if it is time, and rescue what is held and not run, by pool processes that died or at all."""
        if self._file is not None:
            self._file.touch()  # first: what follows raises while there is no store
        if not self.worker_id:
            self.register()  # the store was away when the worker started
        # Those of this process are only told of once: a turn that is cut short must not forget them.
        died = self._processes.died(self.runs.busy() | self.tasks.runs.busy())
        self._runs_died.update(died)
        self._tasks_died.update(died)
        self._beaten, self._orphans, self._rescued = False, 0, 0
        self._duties.do()
        return Beat(self._beaten, self._orphans, self._rescued)

    def _keep_beating(self) -> None:
        self._beaten = self._beat_if_due()

    def _rescue_runs(self) -> None:
        with self.runtime.connections.over(self._beating()):
            self._orphans += self._held.rescue_orphans(self._runs_died)
        self._runs_died.clear()

    def _rescue_tasks(self) -> None:
        with self.runtime.connections.over(self._beating()):
            self._orphans += self.tasks.rescue(self._tasks_died)
        self._tasks_died.clear()

    def _reconcile(self) -> None:
        with self.runtime.connections.over(self._beating()):
            self._rescued = self._held.reconcile()

    def _vouch_for_runs(self) -> None:
        with self.runtime.connections.over(self._beating()):
            self._waiting.vouch()

    def _vouch_for_tasks(self) -> None:
        with self.runtime.connections.over(self._beating()):
            self.tasks.vouch()

    def wait_s(self) -> float:
        """Return how long to wait; a liveness lock that drops ends the wait."""
        if not self._lock.held:
            return WATCH_S
        self._lock.dropped_within(WATCH_S)
        return 0.0

    def close(self) -> None:
        """Close both connections; the lock falls with its own."""
        self._lock.close()
        if self._beat is not None:
            self._beat.close()
        self._beat = None
        if self._file is not None:
            self._file.remove()

    # -- beating -------------------------------------------------------------------------------------------------

    def _beat_if_due(self) -> bool:
        now = time.monotonic()
        if not self._lock.lost and now - self._beat_at < self._settings.heartbeat_interval:
            return False
        if self._is_alive() and self._lock.is_due:
            # Before the lock was lost its absence was no proof, now it is announced anew: the beat clears a suspicion.
            self._lock.take(self.worker_id, self._beating())
            self._is_alive()
        return True

    def _is_alive(self) -> bool:
        """Beat; False if this worker was declared dead meanwhile, and has begun anew."""
        beat = workers.beat(self._beating(), self.worker_id, schema=self._settings.schema)
        if beat is None:
            self._declared_dead()
            return False
        self._beat_at = time.monotonic()
        self._sweep_at = self._beat_at + beat.sweep_in_s if beat.sweep_in_s is not None else float("inf")
        return True

    def _declared_dead(self) -> None:
        """Drop everything and begin anew: what still runs here will be refused by its fence."""
        if self._leaves:
            return
        logger.warning("Worker %d was declared dead while it was silent; its runs begin elsewhere.", self.worker_id)
        received = self.runs.clear()
        tasks = self.tasks.runs.clear()
        self.register()
        for job_id, run_no in received:
            # Those not begun yet will be refused too, as they carry the old identity: they are rung again.
            messages.hasten(self._beating(), job_id, run_no)
        if tasks:
            durable_looks.hasten(self._beating(), tasks)

    def _beating(self) -> OwnExecutor:
        """Return this worker's own connection: all that its thread does in the store goes over it."""
        if self._beat is not None and (self._beat.broken or self._beat.dropped_within(0)):
            self._beat.close()
            self._beat = None
        if self._beat is None:
            self._beat = self.runtime.connections.connect()
        return self._beat

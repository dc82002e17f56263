"""The life of a worker: its identity, its beat, its liveness lock, and its care for what it holds.

A native thread with a connection of its own, because a hub's timers die on reconnect and green threads starve. It
beats every `sidejob_heartbeat_interval`; it watches the processes of its pool every quarter of a second, because
Celery itself takes five seconds to notice that one was killed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from ..model.crash_points import reach
from ..model.errors import StoreUnavailableError
from ..operations import recovery
from ..operations.runtime import Runtime
from ..store import claims, messages, workers
from ..store.connection import Connections, OwnExecutor
from .children import Children
from .errands import Errands
from .runs_here import ENDED, GRACE_S, RunsHere

logger = logging.getLogger("celery_sidejob")

WATCH_S = 0.25
"""How often the processes of the pool are looked at."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What one look did."""

    beaten: bool = False
    orphans: int = 0
    given_back: int = 0


class Heartbeat:
    """Keeps one worker alive in the store, and gives back what it holds and does not run."""

    name = "heartbeat"

    def __init__(self, runtime: Runtime, children: Children | None = None) -> None:
        self.runtime = runtime
        self._children = children or Children()
        self._settings = runtime.settings
        self.runs = RunsHere()
        self.worker_id = 0
        self._died: set[int] = set()
        """Processes of the pool that died and whose runs are not all rescued yet."""
        self.errands = Errands()
        self._beat: OwnExecutor | None = None
        self._lock: OwnExecutor | None = None
        self._beat_at = float("-inf")
        self._reconciled_at = time.monotonic()
        self._look_again = False
        self._lock_lost = False

    # -- identity ------------------------------------------------------------------------------------------------

    def register(self) -> int:
        """Enter this process under a new identity, with its liveness lock where the connection allows one."""
        ident = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        executor = self._beating()
        self.worker_id = workers.register(executor, ident)
        self._beat_at = time.monotonic()
        self._take_lock()
        return self.worker_id

    @property
    def may_claim(self) -> bool:
        """Whether this worker has beaten within its lease, by its own clock."""
        return time.monotonic() - self._beat_at < self._settings.lease

    def leave(self) -> int:
        """Give back everything this worker holds, without counting a loss, and declare it gone."""
        given_back = 0
        try:
            for row in claims.held_by(self.runtime.connections, self.worker_id):
                given_back += recovery.take_back(
                    self.runtime, row.job_id, run_no=row.run_no, worker_id=self.worker_id, own=True, loss=False
                )
            workers.drop_sweeper_lease(self.runtime.connections, self.worker_id)
            workers.leave(self.runtime.connections, self.worker_id)
        except StoreUnavailableError as error:
            logger.warning("Could not give back what this worker held; it is found by its silence: %s", error)
        return given_back

    # -- one look ------------------------------------------------------------------------------------------------

    def run_once(self) -> Beat:
        """Beat if it is time, rescue the runs of pool processes that died, give back what is held and not run."""
        beaten = self._beat_if_due()
        self._died.update(self._children.died(self.runs.busy()))
        orphans = sum(self._rescue(pid) for pid in sorted(self._died))
        given_back = self._reconcile() if self._reconcile_is_due() else 0
        given_back += self._cancel_overdue()
        return Beat(beaten, orphans, given_back)

    def wait_s(self) -> float:
        """Return how long to wait; a liveness lock that drops ends the wait."""
        if self._lock is None or self._lock_lost:
            return WATCH_S
        self._lock_lost = self._lock.dropped_within(WATCH_S)
        return 0.0

    def close(self) -> None:
        """Close both connections; the lock falls with its own."""
        for executor in (self._lock, self._beat):
            if executor is not None:
                executor.close()
        self._lock = self._beat = None

    # -- beating -------------------------------------------------------------------------------------------------

    def _beat_if_due(self) -> bool:
        now = time.monotonic()
        if not self._lock_lost and now - self._beat_at < self._settings.heartbeat_interval:
            return False
        if self._lock_lost and self._lock is not None:
            self._lock.close()
            self._lock = None
        if not workers.beat(self._beating(), self.worker_id):
            self._declared_dead()
            return True
        self._beat_at = time.monotonic()
        if self._lock_lost or self._lock is None:
            self._take_lock()
            workers.beat(self._beating(), self.worker_id)
        return True

    def _declared_dead(self) -> None:
        """Drop everything and begin anew: what still runs here will be refused by its fence."""
        logger.warning("Worker %d was declared dead while it was silent; its runs begin elsewhere.", self.worker_id)
        received = self.runs.clear()
        self.register()
        for job_id, run_no in received:
            # Those not begun yet will be refused too, as they carry the old identity: they are rung again.
            messages.hasten(self.runtime.connections, job_id, run_no)

    def _beating(self) -> OwnExecutor:
        if self._beat is None or self._beat.broken:
            self._beat = self.runtime.connections.connect()
        return self._beat

    def _take_lock(self) -> None:
        """Hold the liveness lock on a direct connection; without one the beat alone must do."""
        self._lock_lost = False
        if self._lock is not None:  # of an identity that was declared dead
            self._lock.close()
        url = self._settings.direct_url or self._settings.require_database_url()
        try:
            self._lock = Connections(url, self._settings.schema, prepare=False).connect()
            taken = workers.take_lock(self._lock, self.worker_id, self._settings.schema)
        except StoreUnavailableError as error:
            logger.warning("No liveness lock: %s", error)
            taken = False
        workers.announce_lock(self._beating(), self.worker_id, taken)
        if not taken and self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- what is held --------------------------------------------------------------------------------------------

    def _rescue(self, pid: int) -> int:
        """Rescue what a process of the pool that died was running, or was about to claim."""
        reach("rescue:before")
        held = [row for row in claims.held_by(self.runtime.connections, self.worker_id) if row.pid == pid]
        plans = [(row, self.runs.plan_of((row.job_id, row.run_no))) for row in held]
        held = [row for row, plan in plans if plan != ENDED]
        rescued = sum(
            recovery.take_back(
                self.runtime, row.job_id, run_no=row.run_no, worker_id=self.worker_id, own=True, loss=plan is None
            )
            for row, plan in plans
            if plan != ENDED
        )
        if rescued < len(held):
            return rescued  # somebody has one of the jobs locked just now: tried again at the next look
        self._died.discard(pid)
        for job_id, run_no in self.runs.of_process(pid):
            # If it died before its claim, its message, acknowledged already, is rung again.
            messages.hasten(self.runtime.connections, job_id, run_no)
        self._look_again = True
        return rescued

    def _cancel_overdue(self) -> int:
        """Take back, as lost, runs whose body should have renewed their lease by itself, and end their process."""
        leases = self.runs.own_leases()
        if not leases:
            return 0
        taken = 0
        for row in claims.overdue(self.runtime.connections, leases, worker_id=self.worker_id):
            logger.warning("Run %d of job %d did not renew its lease in time", row.run_no, row.job_id)
            taken += recovery.take_back(
                self.runtime, row.job_id, run_no=row.run_no, worker_id=self.worker_id, own=True, loss=True
            )
            self.runs.stopped((row.job_id, row.run_no))
            if row.pid != os.getpid():  # a thread cannot be ended; its commit will be refused
                with suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)
        return taken

    def _reconcile_is_due(self) -> bool:
        # It reads the whole of `messages`, so only after a death here, and otherwise once per lease.
        if self.errands.waiting:
            return False  # runs that this worker stopped are still to be ended
        self.runs.sweep()
        return self._look_again or time.monotonic() - self._reconciled_at > self._settings.lease

    def _reconcile(self) -> int:
        """Give back, as lost, what this worker holds and has not been running for a while."""
        self._look_again = False
        self._reconciled_at = time.monotonic()
        given_back = 0
        for row in claims.held_by(self.runtime.connections, self.worker_id, older_than_s=GRACE_S):
            if row.old and not self.runs.knows((row.job_id, row.run_no)):
                taken = recovery.take_back(
                    self.runtime, row.job_id, run_no=row.run_no, worker_id=self.worker_id, own=True, loss=True
                )
                given_back += taken
                self._look_again |= not taken  # locked just now, or ended after all
        return given_back

"""Deferred locks of durable tasks: a run begins in memory, and is locked if it still runs at the next flush.

Only tasks that may be repeated (`locks_late`) defer their locks, and only for a delivery that is plainly the first of
its message. In each process one thread, which lives while there is something to write, locks the runs older than
`EVERY_S` and removes the rows of those that have ended, with one statement for each group. A delivery that is not
plainly the first locks at once. Of two deliveries, therefore, one gets the row. The other finds that out at its flush,
and does not count.

If a process dies before its flush, its rows are held by no run. They are published again as copies, which lock at once.
`tests/protocol_model/late_locks.py` walks all interleavings, and shows the faults of simpler rules.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from ..model import native
from ..model.durable import Key
from ..model.errors import SchemaError, StoreUnavailableError
from ..model.events import TaskEndedWell
from ..model.run_end import RunEnd
from ..store import write_behind
from ..store.connection.own_executor import OwnExecutor
from ..store.errors import OutcomeUnknown
from ..store.outbox import latecomers
from ..store.outbox.latecomers import LateRun
from ..store.statement import Transaction
from . import measuring
from .after_commit import tell
from .contents import is_forged
from .durable_runs import ENDED, HELD, OVER, REFUSED, WAITS, WRITING, LateLock, Run
from .runtime import Runtime
from .task_run_end import end_task_runs

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")

EVERY_S = 0.02
"""Seconds between two flushes; a run goes without a lock for at most this long and one flush more."""
BEHIND_S = 0.25
"""Seconds after which an unanswered flush keeps further runs from beginning without a lock."""
RETRY_S = 0.2
AT_REST_S = 0.2
"""Seconds for which the idle thread keeps looking for work: waking it would cost each run more."""
LINGER_S = 5.0
"""Seconds for which it then waits to be woken, before it ends."""
POLL_S = 0.002
PAGE = 1000
NAME = "late locks"


class LateLocks:
    """The runs of one process whose rows it has still to lock or to remove in one store."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.forget()
        write_behind.register(self)

    def forget(self) -> None:
        """After a fork: all pending work belongs to the parent."""
        self._lock = native.lock()
        self._runs: dict[Key, LateLock] = {}
        self._thread: threading.Thread | native.Thread | None = None
        self._bell = native.Bell()
        self._rests = False
        self._writing_since: float | None = None
        self._fails = False
        self._executor: OwnExecutor | None = None
        self._thread_id: int | None = None

    # -- what runs ask -------------------------------------------------------------------------------------------

    def begin(self, run: Run, *, max_losses: int) -> bool:
        """Let a run begin whose lock is written later; False if it must lock now, as earlier locks are not written."""
        now = time.monotonic()
        with self._lock:
            since = self._writing_since
            if self._fails or (since is not None and now - since > BEHIND_S) or run.key in self._runs:
                return False
            self._runs[run.key] = run.late = LateLock(run, max_losses, now)
            thread = self._thread_wanted()
        if thread is not None:
            thread.start()  # not under the lock: with gevent the start may wait
        return True

    def has(self, key: Key) -> bool:
        """Tell whether this process runs the task, or has not removed its row yet: then the task needs no copy."""
        return key in self._runs

    def is_written(self, run: Run) -> bool:
        """Tell whether it is already known which run has the row."""
        return self._of(run).state in (HELD, REFUSED)

    def end(self, run: Run) -> None:
        """Have the row of a run removed that ended well and that nothing follows.

        If the process dies before the next flush, the row is found again, and the run is repeated.
        """
        run.ended_at = time.monotonic()
        with self._lock:
            late = self._of(run)
            if late.state == WRITING:
                late.then = ENDED
            else:
                late.state = ENDED
            thread = self._thread_wanted()
        if thread is not None:
            thread.start()

    def drop(self, run: Run) -> None:
        """Write nothing more for a run that is over, unless its row is still to be removed."""
        with self._lock:
            late = self._of(run)
            if late.state == WRITING:
                late.then = late.then or OVER
            elif late.state != ENDED:
                self._forget(late)

    def take(self, run: Run) -> bool:
        """Lock the row now; False if another run has the row, or it is gone or doomed: then this run does not count.

        Raises StoreUnavailableError if the store does not answer; then the lock is written later.
        """
        late = self._of(run)
        while True:
            ours = False
            try:
                with self._lock:
                    if late.state == WAITS:
                        ours = True
                        late.state = WRITING
                    elif late.state != WRITING:
                        return late.state == HELD
                if ours:
                    self._write_locks([late])
                    break
            finally:
                if ours:  # whatever interrupts: else its state would stay WRITING for ever
                    with self._lock:
                        self._go_on_with([late])
            time.sleep(POLL_S)  # not on a lock, for which all greenlets would wait
        return late.state == HELD

    # -- writing -------------------------------------------------------------------------------------------------

    def write_now(self) -> None:
        """Write all pending locks and ends, or log why not: this process ends, or its worker gives back its runs."""
        deadline = time.monotonic() + self._runtime.stores.wait_s
        while self._writing_since is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        try:
            while self._write(older_than_s=0.0):
                pass
        except (StoreUnavailableError, SchemaError) as error:
            logger.warning("What has run without a lock is found by the sweeper, and runs again: %s", error)

    def _write(self, *, older_than_s: float) -> bool:
        """Lock runs older than this and remove the rows of ended ones; False if there were none."""
        now = time.monotonic()
        with self._lock:
            known = self._runs.values()
            running = [late for late in known if late.state == WAITS and now - late.began_at >= older_than_s][:PAGE]
            ended = [late for late in known if late.state == ENDED][:PAGE]
            if not running and not ended:
                self._fails = False
                return False
            for late in (*running, *ended):
                late.state, late.then = WRITING, None if late.state == WAITS else ENDED
            self._writing_since = now
        fails = True
        try:
            self._write_apart(self._write_ends, ended)
            self._write_apart(self._write_locks, running)
            fails = False
        finally:
            with self._lock:
                self._go_on_with((*running, *ended))
                self._writing_since, self._fails = None, fails
        return True

    def _write_apart(self, write: Callable[[Sequence[LateLock]], None], lates: Sequence[LateLock]) -> None:
        """Write these runs, one by one if they fail together; the sweeper finds those that cannot be written."""
        try:
            write(lates)
        except (StoreUnavailableError, SchemaError):
            raise
        except Exception:
            if len(lates) > 1:
                for late in lates:
                    if late.then != OVER:
                        self._write_apart(write, [late])
                return
            logger.exception("What task %s has run without a lock cannot be written", lates[0].run.key[0])
            lates[0].then = OVER

    def _is_idle(self) -> bool:
        return all(late.state in (HELD, REFUSED) for late in self._runs.values())

    def _go_on_with(self, written: Sequence[LateLock]) -> None:
        """Apply ends that arrived while locks were being written, and return unwritten runs to the queue."""
        for late in written:
            then, late.then = late.then, None
            if then == ENDED:
                late.state = ENDED
            elif then == OVER or late.state == OVER:
                self._forget(late)
            elif late.state == WRITING:
                late.state = WAITS

    def _forget(self, late: LateLock) -> None:
        late.state = OVER
        if self._runs.get(late.run.key) is late:
            del self._runs[late.run.key]

    def _write_locks(self, running: Sequence[LateLock]) -> None:
        for of_worker in _by_worker(running):
            worker_id = of_worker[0].run.worker_id
            lock = partial(latecomers.lock_late, worker_id=worker_id, pid=os.getpid())
            held = self._transact("durable-late-lock", lock, of_worker)
            with self._lock:
                for late in of_worker:
                    late.state = HELD if late.run.key[0] in held else REFUSED
            for late in of_worker:
                if late.run.key[0] in held:
                    measuring.row_found(late.run, held[late.run.key[0]])

    def _write_ends(self, ended: Sequence[LateLock]) -> None:
        for of_worker in _by_worker(ended):
            worker_id = of_worker[0].run.worker_id
            remove = partial(_remove, worker_id=worker_id)
            try:
                gone = self._transact("durable-late-end", remove, of_worker)
                for late in of_worker:
                    if late.run.key[0] in gone or late.run.is_revoked:
                        late.then = OVER  # at once: a retry of the others no longer finds its row
                for late in of_worker:
                    if late.run.key[0] in gone:
                        measuring.row_found(late.run, gone[late.run.key[0]])
                        measuring.task_ended(late.run, RunEnd.COMPLETED)
                self._take_back([late for late in of_worker if late.then != OVER])
            except OutcomeUnknown:
                for late in of_worker:
                    late.is_unknown = True
                raise

    def _take_back(self, left: Sequence[LateLock]) -> None:
        """Take runs out of the dead set that were revoked or expired before they had a lock, and have ended well."""
        if not left:
            return
        taken = self._transact("durable-late-end", latecomers.take_back_late, left)
        for late in left:
            late.then = OVER
            task_id = late.run.key[0]
            if task_id in taken:
                tell(self._runtime, TaskEndedWell(task_id, late.run.task))
            elif not late.is_unknown and not is_forged(self._runtime, late.run.key, late.run.content):
                logger.warning(
                    "Task %s has run without a lock, and that run does not count: a copy of it does", task_id
                )

    def _transact(self, name: str, write: Callable[[Transaction, list[LateRun]], T], lates: Sequence[LateLock]) -> T:
        """Write runs that belong together, and return those that were written, by their ids."""

        def work(executor: Transaction) -> T:
            now = time.monotonic()
            return write(
                executor,
                [LateRun(late.run.key[0], late.run.content, now - late.began_at, late.max_losses) for late in lates],
            )

        with self._over_own():
            return self._runtime.connections.transact(name, work, single=True, within_s=self._runtime.stores.wait_s)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _thread_wanted(self) -> threading.Thread | native.Thread | None:
        """Wake the thread, or return a new one to start. Under gevent it is real: bodies may block all greenlets."""
        if self._thread is None:
            name = self._runtime.store.called("sidejob-late-locks")
            if native.is_patched():
                self._thread = native.Thread(self._run, name=name)
            else:
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            return self._thread
        if self._rests:
            self._rests = False
            self._bell.ring()
        return None

    def _run(self) -> None:
        """Write every `EVERY_S`; rest when there is nothing to write, and end when nothing comes."""
        fails, wrote_at = 0, time.monotonic()
        self._thread_id = native.thread_id()
        while True:
            native.sleep(EVERY_S if not fails else RETRY_S)
            try:
                if self._write(older_than_s=EVERY_S):
                    wrote_at = time.monotonic()
                fails = 0
            except Exception as error:
                fails += 1
                if fails == 1:
                    known = isinstance(error, StoreUnavailableError)
                    logger.warning("Late locks are not written, tried again: %s", error, exc_info=not known)
            if time.monotonic() - wrote_at > AT_REST_S:
                if not self._rest():
                    return
                wrote_at = time.monotonic()

    def _rest(self) -> bool:
        """Wait to be woken; False if nothing wakes this thread and it is no longer the one that writes."""
        with self._lock:
            if not self._is_idle():
                return True
            self._rests = True
        woken = self._bell.wait(LINGER_S)
        with self._lock:
            self._rests = False
            if woken or not self._is_idle():
                return True
            self._thread = None
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        return False

    def _over_own(self) -> AbstractContextManager[None]:
        """Under gevent the thread has a connection of its own; it cannot use those of greenlets."""
        if not native.is_patched() or native.thread_id() != self._thread_id:
            return nullcontext()
        if self._executor is None or self._executor.broken:
            self._executor = self._runtime.connections.connect()
        return self._runtime.connections.talking(over=self._executor)

    def _of(self, run: Run) -> LateLock:
        assert run.late is not None
        return run.late


def _by_worker(lates: Sequence[LateLock]) -> Iterator[list[LateLock]]:
    """Yield the runs of each worker identity, sorted, so that two processes never wait for each other."""
    for worker_id in {late.run.worker_id for late in lates}:
        yield sorted((late for late in lates if late.run.worker_id == worker_id), key=lambda late: late.run.key)


def _remove(executor: Transaction, runs: list[LateRun], *, worker_id: int) -> dict[str, Any]:
    ended = end_task_runs(executor, latecomers.remove_late(runs, worker_id=worker_id, pid=os.getpid()))
    return {row.task_id: row for row in ended}


def of(runtime: Runtime) -> LateLocks:
    """Return the deferred locks of this process in a store."""
    return runtime.connections.write_behind(NAME, lambda: LateLocks(runtime))


def is_here(runtime: Runtime, key: Key) -> bool:
    """Tell whether this process runs a task without a lock, or has not removed its row yet."""
    found = runtime.connections.if_write_behind(NAME)
    return isinstance(found, LateLocks) and found.has(key)


def write_now(runtime: Runtime) -> None:
    """Write the pending locks and ends of this process."""
    found = runtime.connections.if_write_behind(NAME)
    if found is not None:
        found.write_now()

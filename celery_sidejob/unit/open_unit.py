"""The unit of the run in progress: what it has read ahead, and what it will write at its next commit.

No transaction is open while user code runs. A unit reads its own writes: whoever asks inside the run sees what the
commit will make of the store. One thread runs one job at a time; the unit belongs to that thread, and to others that it
has given its context (`contextvars.copy_context()`, `asyncio.to_thread`), until the run is over.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ..model.changes import Change, ConfigurePorts, NewJob, PortKey, RememberInputs, Stage
from ..model.crash_points import reach
from ..model.errors import IllegalMoveError, LeaseLostError, PortFullError, SideJobError, StoreUnavailableError
from ..model.port import WILDCARD
from ..operations import runs
from ..operations.hold import BeginsAgainError, Hold
from ..operations.runs import Unit
from ..operations.runtime import Runtime
from ..operations.unit_of_work import Applied, carry_out
from ..store import claims, jobs, ports, state, trees
from ..store.borrowed.lending import owners
from ..store.outbox import holds
from ..store.trouble import comes_from, is_trouble
from . import view
from .children import Children
from .lent_unit import LentUnit, Undone, in_doubt
from .progress import Told
from .read_ahead import ReadAhead


class NoRoom(BaseException):
    """A commit of the run has found a port full: the run ends, and begins again when there is room.

    Not an Exception, so that a body's ``except Exception`` does not swallow it.
    """

    def __init__(self, full: PortFullError) -> None:
        super().__init__(str(full))
        self.full = full.full


class OpenUnit:
    """The unit of one run: the packets it has read, and the changes it will write."""

    def __init__(self, runtime: Runtime, hold: Hold) -> None:  # noqa: PLR0915 - what a unit knows
        self.runtime = runtime
        self.hold = hold
        self.unit = Unit()
        self.job: Any = None
        self.children = Children(runtime, hold)
        self.stopping: Callable[[], bool] = lambda: False
        self._ahead = ReadAhead(runtime, hold)
        self._ports: dict[int, dict[tuple[str, str], Any]] = {}
        self._known: set[PortKey] = set()
        self._lent: LentUnit | None = None
        self._undone: Undone | None = None
        self._in_doubt = False
        self._lenders: Sequence[Any] = ()
        self.then: tuple[Stage, float] | None = None
        """What the job goes on with, and after how many seconds, if this run completes; commits before that keep it."""
        self.told = Told(runtime, hold)
        self.in_block = False
        """Whether the body is in a block of `job.unit()`, which commits what is done there."""
        self.in_turn = False
        """Whether the body is in a turn of `for_inputs`."""
        self.of_log = False
        """Whether the run has read an entry of the log: then it makes none, which it would receive again."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._interrupted = False
        self._over = False

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Apply the unit, and begin the next."""
        with self._in_progress():
            self.settle()
            self._check_done()
            self._undone, self._in_doubt = None, False
            self._interrupted = True
            try:
                with within(None):  # what follows it, such as receivers of signals, is no part of the next unit
                    runs.commit(self.runtime, self.hold, self.unit)
            except (SideJobError, BeginsAgainError) as error:
                self._interrupted = isinstance(error, StoreUnavailableError)  # the others are refusals
                if isinstance(error, PortFullError) and error.may_pass:
                    raise NoRoom(error) from None
                raise
            self._interrupted = False
            self._begin_next()

    def end(self) -> None:
        """Let nothing more be added: what is there now is the run's last unit, or nothing is to be committed at all."""
        with self._lock:
            self._over = True

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        """Keep other threads out for the block; raise IllegalMoveError where what it adds would never be committed."""
        with self._lock if self._pid == os.getpid() else nullcontext():  # a copy of it may be held for ever
            if self._over or self._pid != os.getpid():
                hold = self.hold
                raise IllegalMoveError(
                    f"Run {hold.run_no} of job {hold.job_id} is over, or goes on in another process: a thread it has "
                    "left behind, or a process forked from it, cannot add to it. Let the body wait for its threads, "
                    "or start them without its context."
                )
            yield

    @contextmanager
    def block(self, transaction: Any) -> Iterator[None]:
        """Write the unit with what the block adds into the caller's transaction, as the block ends.

        After an error in the block, or a rollback, the run goes on from before it. What was read by then waits for the
        block to be repeated: the body may neither read on nor end without that.
        """
        with self._in_progress():
            self._begin_lending(transaction)
            if self.in_block:
                raise IllegalMoveError(
                    f"job.unit() of job {self.hold.job_id} was called inside another block of job.unit(), which is "
                    "still open: leave that block, and commit its transaction, before the next."
                )
            before = self.unit.copy()
            self.in_block = True
        try:
            yield
        except BaseException as error:
            self._go_back_from_block(before, error)
            raise
        finally:
            self.in_block = False
        self.commit_with(transaction, before)

    def commit_with(self, transaction: Any, before: Unit | None = None) -> None:
        """Write the unit into the caller's transaction; it counts once that is committed.

        After a rollback the run goes on from `before` the block (by default from what is there now).
        """
        with self._in_progress():
            self._begin_lending(transaction)
            is_block, before = before is not None, before or self.unit.copy()
            borrowed = self.runtime.connections.borrow(transaction)
            try:
                if borrowed.autocommit:
                    raise IllegalMoveError(
                        f"job.unit() or checkpoint() of job {self.hold.job_id} was given a connection in autocommit: "
                        "begin a transaction on it, so that your rows and the unit can commit together."
                    )
                if borrowed.never_commits:
                    raise IllegalMoveError(
                        f"job.unit() or checkpoint() of job {self.hold.job_id} was given the connection of a Django "
                        "TestCase, whose transaction is never committed. Use a TransactionTestCase for this test."
                    )
                number, follow = runs.commit_with(self.runtime, self.hold, self.unit, borrowed)
                heard = borrowed.watch_commit()
            except BaseException as error:
                self._go_back_from_block(before, error)
                if isinstance(error, PortFullError) and error.may_pass:
                    raise NoRoom(error) from None
                raise
            unhooked = None if borrowed.tells_of_commits else follow  # asked now: Django would open a closed connection
            self._lent = LentUnit(self.hold.job_id, borrowed, number, before, is_block, unhooked, heard)

    def _begin_lending(self, transaction: Any) -> None:
        """Settle, and refuse a block that would do again what the last one has done."""
        self.settle()
        self._lenders = owners(transaction)
        if self._in_doubt:
            raise in_doubt(self.hold.job_id)

    def is_trouble_of_store(self, error: BaseException) -> bool:
        """Tell whether the store, or the way to it, has failed, as the body's own connection to it has seen."""
        return bool(self._lenders) and is_trouble(error) and comes_from(error, self._lenders)

    def leave_turn(self) -> None:
        """Raise UnitNotCommittedError if the body has left a turn of `for_inputs` whose block was not committed.

        One that was committed without an answer is done: the next turn has other packets.
        """
        with self._in_progress():
            self.settle()
            self._check_done()
            self._in_doubt = False

    def finish(self) -> None:
        """Settle as the body ends; raises UnitNotCommittedError if its last block was not committed."""
        self.settle()
        self._check_done(ending=True)

    def _check_done(self, *, ending: bool = False) -> None:
        undone = self._undone
        if undone is not None and (undone.has_inputs or ending) and not self.in_block:
            self._undone = None
            self.go_back(Unit(self.unit.surviving(self.hold.job_id), serial=self.unit.serial))
            raise undone.error() from undone.cause

    def settle(self) -> None:
        """Learn what became of a unit that was written into the caller's transaction, or whose commit was interrupted.

        Raises IllegalMoveError while that transaction is still open: its lock on the job would hold up the run. What
        hooks tell is not enough: a savepoint may have been rolled back, or a session's commit may not be the outermost.
        """
        if self._interrupted:
            applied, self._interrupted = runs.was_applied(self.runtime, self.hold), False
            if applied:
                self._applied()
        lent = self._lent
        if lent is None:
            return
        if lent.is_open(self.runtime.connections):
            raise lent.still_open()
        applied = runs.is_applied(self.runtime, self.hold)
        self._lent = None
        if applied:
            self._applied()
            reach("unit:after-commit")
            self._in_doubt = not lent.commit_was_heard()
            if lent.follow is not None:
                lent.follow()
        else:
            self.go_back(lent.before)
            self._undone = lent.rolled_back(self.unit)

    def _applied(self) -> None:
        self.hold.unit_no += 1
        self.hold.started = True
        self._undone = None
        self._begin_next()

    def _begin_next(self) -> None:
        self._ports.clear()
        self.unit = Unit(took=self.unit.took)  # what a run took stays taken until it ends
        self.children.begin_next()
        self._ahead.begin_next()

    def go_back(self, before: Unit) -> None:
        """Forget what this unit did since the snapshot `before` was taken; what it had read is read again.

        If a commit came in between, what the snapshot holds is applied already: the whole unit since then is forgotten.
        """
        if before.serial != self.unit.serial:
            before = Unit(serial=self.unit.serial)
        before.took = before.took or self.unit.took  # taken packets stay taken until the run ends, and are freed then
        unread = {packet for _, packet in self.unit.read} - {packet for _, packet in before.read}
        self.unit = before
        self._ahead.unread(unread)

    def _go_back_from_block(self, before: Unit, error: BaseException) -> None:
        """Go back to before a block that was left by an error, or that the store has refused."""
        self.go_back(before)
        self._undone = Undone(self.hold.job_id, has_inputs=True, cause=error) if self.unit.has_inputs else None

    def discard(self) -> None:
        """Forget what was not committed, but for a termination of the run's own job: the run raised.

        A transaction that the body left open, with the unit and the lock on the job in it, is rolled back: the run
        could not be ended otherwise.
        """
        if self._lent is not None and self._lent.is_open(self.runtime.connections):
            self._lent.roll_back()
        self.settle()
        self._undone = None
        self.unit = Unit(self.unit.surviving(self.hold.job_id), took=self.unit.took)

    def renew(self) -> None:
        """Move the run's own deadline, and raise LeaseLostError if it is no longer the job's current run."""
        hold = self.hold
        holds.touch(self.runtime.connections, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id)
        row = claims.outcome(self.runtime.connections, hold.job_id)
        if row is None or (row.run_no, row.worker_id) != (hold.run_no, hold.worker_id):
            raise LeaseLostError(f"Run {hold.run_no} of job {hold.job_id} is no longer its current run.")

    def _go_on(self, *, reading: bool = False) -> None:
        """Take note that the body goes on, as it would if it knew what became of its last block.

        To read on within a turn is no sign of that: the packet may be for a repetition of the block.
        """
        if self._undone is not None and not self._undone.has_inputs:
            self._undone = None
        if reading and not (self.in_turn or self.in_block):
            self._in_doubt = False

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, change: Change) -> None:
        """Have the next commit apply `change`."""
        with self._in_progress():
            self.settle()
            self._go_on()
            self.unit.changes.append(change)
            self._ahead.some_configured |= isinstance(change, ConfigurePorts)

    # -- reading its own writes ----------------------------------------------------------------------------------

    @property
    def changes(self) -> list[Change]:
        """What this unit will apply, in order; a unit in the caller's transaction is settled once that is over."""
        if self._lent is not None and not self._lent.is_open(self.runtime.connections):
            self.settle()
        return self.unit.changes

    def new_jobs(self) -> dict[int, NewJob]:
        """Return the jobs this unit will create."""
        return view.new_jobs(self.changes)

    def state(self, job_id: int, key: str | None = None) -> dict[str, str]:
        """Return a job's state as this unit leaves it, {key: JSON text}."""
        new = self.new_jobs().get(job_id)
        found = new.state if new else state.read(self.runtime.connections, job_id, key)
        return view.state(self.unit.changes, job_id, found)

    def family(self, parent_id: int) -> tuple[dict[str, int], set[int]]:
        """Return the children this unit gives a job, {name: id}, and the ids or names it takes away."""
        return view.family(self.changes, parent_id)

    def ancestors(self, job_id: int) -> list[int]:
        """Return a job and everything above it as this unit leaves them, the root last."""
        return view.ancestors(self.changes, job_id, lambda start: trees.ancestors(self.runtime.connections, start))

    def aliases(self, job_id: int | None = None) -> tuple[dict[str, int], set[str]]:
        """Return the aliases this unit gives, {name: job id}, and those it takes away; of one job, or of all."""
        return view.aliases(self.changes, job_id)

    def ports(self, job_id: int) -> dict[tuple[str, str], Any]:
        """Return a job's ports as this unit leaves them, {(direction, name): row}."""
        new = self.new_jobs().get(job_id)
        if new is not None:
            return view.ports(self.unit.changes, job_id, view.ports_made(new.ports))
        if job_id not in self._ports:
            self._ports[job_id] = ports.of_job(self.runtime.connections, job_id)
        return view.ports(self.unit.changes, job_id, self._ports[job_id])

    def port(self, key: PortKey) -> Any | None:
        """Return a port as this unit leaves it, or the pattern that allows it; None if the job has no such port."""
        job_id, direction, name = key
        empty = self._ahead.empty(key)
        rows = self.ports(job_id) if empty is None else view.ports(self.changes, job_id, {(direction, name): empty})
        found = rows.get((direction, name)) or rows.get((direction, WILDCARD))
        if found is not None:
            self._known.add(key)
        return found

    def knows_port(self, key: PortKey) -> bool:
        """Tell without the store whether a port is there: it was found before, or is the run's own by its task."""
        job_id, direction, name = key
        if key not in self._known and job_id == self.hold.job_id:
            declared = self.runtime.tasks.ports(self.hold.row.task)[direction == "out"]
            if name in declared or WILDCARD in declared:
                self._known.add(key)
        return key in self._known

    def inputs_memo(self) -> dict[str, Any]:
        """Return with which defaults `for_inputs` has called the body already, as this unit leaves it."""
        text = jobs.inputs_memo(self.runtime.connections, self.hold.job_id)
        for change in self.unit.changes:
            if isinstance(change, RememberInputs):
                text = change.memo
        memo: dict[str, Any] = json.loads(text or "{}")
        return memo

    # -- packets -------------------------------------------------------------------------------------------------

    def next_packet(self, key: PortKey, *, many: bool) -> Any | None:
        """Read the next packet of a port as part of this unit; None if there is none."""
        with self._in_progress():
            self.settle()
            self._check_done()
            self._go_on(reading=True)
            found = self._ahead.next(self.unit, key, many=many)
            return found if found is not None else self._own_packet(key)

    def drain(self, key: PortKey, most: int | None = None) -> list[Any]:
        """Read all packets of a port as part of this unit, or `most`, in two statements at most."""
        with self._in_progress():
            self.settle()
            self._check_done()
            self._go_on(reading=True)
            found = self._ahead.drain(self.unit, key, most)
            for change in view.writes(self.unit.changes, key):  # what this very unit wrote is then never stored
                left = len(change.packets) if most is None else most - len(found)
                self._replace(change, replace(change, packets=change.packets[left:]))
                found += [view.Written(*packet) for packet in change.packets[:left]]
            return found

    def peek(self, key: PortKey, limit: int) -> list[Any]:
        """Return the next packets without reading them."""
        written = [view.Written(*packet) for write in view.writes(self.changes, key) for packet in write.packets]
        found = self._ahead.peek(key, limit) if view.keeps_stored(self.unit.changes, key) else []
        return (found + written)[:limit]

    def count(self, key: PortKey) -> int:
        """Return how many packets wait on a port."""
        written = sum(len(write.packets) for write in view.writes(self.changes, key))
        return written + (self._ahead.count(key) if view.keeps_stored(self.unit.changes, key) else 0)

    def has_packet(self, key: PortKey) -> bool:
        """Tell whether a read would find a packet."""
        changes = self.changes
        return self._ahead.has(self.unit, key) or any(write.packets for write in view.writes(changes, key))

    def _own_packet(self, key: PortKey) -> view.Written | None:
        """Read back the oldest packet that this very unit wrote: it is then never stored."""
        for write in view.writes(self.unit.changes, key):
            if write.packets:
                self._replace(write, replace(write, packets=write.packets[1:]))
                return view.Written(*write.packets[0])
        return None

    def _replace(self, old: Change, new: Change) -> None:
        index = next(n for n, change in enumerate(self.unit.changes) if change is old)
        self.unit.changes[index] = new


_active: ContextVar[OpenUnit | None] = ContextVar("celery_sidejob_open_unit", default=None)

active = _active.get
"""Returns the unit of the run that this thread (or greenlet) is in, None outside of runs."""

# A process that a body forks is as outside of the run as one that it spawns: what is asked there happens at once.
os.register_at_fork(after_in_child=lambda: _active.set(None))


@contextmanager
def within(unit: OpenUnit | None) -> Iterator[None]:
    """Make this the unit of whatever asks and reads in the block; with None that is outside of runs."""
    token = _active.set(unit)
    try:
        yield
    finally:
        _active.reset(token)


def submit(runtime: Runtime, name: str, change: Change, transaction: Any = None) -> Applied | None:
    """Have a change applied: by the commit of the run in progress here, else now or in the caller's transaction.

    Returns None if it is left to the commit of a run.
    """
    unit = active()
    if unit is not None and transaction is None:
        unit.add(change)
        return None
    return carry_out(runtime, name, [change], transaction)

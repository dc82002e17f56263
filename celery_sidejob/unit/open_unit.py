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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import proxy

from ..awaiting import Parts
from ..model import native
from ..model.changes import Change, ConfigurePorts, KeepStep, PortKey, RememberInputs, Stage, Terminate
from ..model.crash_points import reach
from ..model.errors import IllegalMoveError, LeaseLostError, PortFullError, SideJobError, StoreUnavailableError
from ..model.status import RunEnd
from ..operations.changes.unit_of_work import Applied, carry_out
from ..operations.hold import BeginsAgainError, Hold
from ..operations.runs import measuring, runs
from ..operations.runs.measuring import Told
from ..operations.runs.runs import Unit
from ..operations.runtime import Runtime
from ..store import claims, jobs
from ..store.borrowed.borrowed import comes_from, is_trouble
from ..store.borrowed.lending import owners
from ..store.connection import turns
from ..store.outbox import holds
from . import view
from .lent_unit import LentUnit, Undone, in_doubt
from .read_ahead import Children, ReadAhead
from .steps import Steps

R = TypeVar("R")


class Suspend(BaseException):
    """Ends a run as suspended. Not an Exception, so that a body's ``except Exception`` does not swallow it."""

    def __init__(self, job_id: int, timeout_s: float | None = None) -> None:
        """`timeout_s`: for how long the job waits, at most."""
        super().__init__(job_id)
        self.timeout_s = timeout_s


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
        unit = proxy(self)  # no cycle: what a run has read, maybe megabytes, is to go with it
        self.seen = view.Seen(runtime, hold, pending=lambda: unit.changes, empty=self._ahead.empty)
        self._lent: LentUnit | None = None
        self._undone: Undone | None = None
        self._block_unheard = False
        """Whether the last block of `job.unit()` was committed without an answer."""
        self._step_unheard: str | None = None
        """The step whose transaction was committed without an answer."""
        self._lenders: Sequence[Any] = ()
        self.then: tuple[Stage, float] | None = None
        """What the job goes on with, and after how many seconds, if this run completes; commits before that keep it."""
        self.told = Told(runtime, hold)
        self.in_block = False
        """Whether the body is in a block of `job.unit()`, which commits what is done there."""
        self.turn: tuple[Sequence[tuple[int, int]], Sequence[Any]] | None = None
        """The turn of `for_inputs` in which the body is: its packets (none where defaults stand in), and its values."""
        self.has_defaults_only = False
        """Whether the body is in a turn without a packet: what it writes then are defaults too.

        The packets of the turn do not tell: one that the body has written itself, in this unit, is not among them yet.
        """
        self.reads: set[str] = set()
        """The job's input ports from which the body reads outside of steps."""
        self.steps: Steps | None = None
        """The steps of the run, once the body has come to one."""
        self._own: Unit | None = None
        """What the body has done outside of steps, while it is in a step, whose unit `unit` is then."""
        self._whole: Unit | None = None
        """The unit of which a part is committed first, while that is in progress or in doubt."""
        self.startup: tuple[int, int] | None = None
        """How many changes and reads of the unit are the startup's, once the body is called; None in a hook."""
        self.turns_over = False
        """Whether the unit has read packets of turns that are over."""
        self._rest: Unit | None = None
        """The unit with which the run ends in the wait of a step."""
        self.of_log = False
        """Whether the run has read an entry of the log: then it makes none, which it would receive again."""
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._committing: int | None = None
        """The number of the unit whose commit was begun, until it is known what became of that."""
        self._over = False

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Apply the unit, and begin the next."""
        with self._in_progress():
            self.settle()
            self.check_not_apart("checkpoint()")
            self._check_done()
            if self.steps is not None:
                self.steps.join()
            self._apply(self._commit)

    def _commit(self, name: str = "checkpoint") -> None:
        runs.commit(self.runtime, self.hold, self.unit, name)

    def _apply(self, write: Callable[[], None]) -> None:
        """Have `write` commit the unit, and begin the next."""
        self._undone, self._block_unheard = None, False
        self._committing = self.hold.unit_no
        try:
            with within(None):  # what follows it, such as receivers of signals, is no part of the next unit
                write()
        except (SideJobError, BeginsAgainError) as error:
            if not isinstance(error, StoreUnavailableError):  # the others are refusals
                self._committing = None
            if isinstance(error, PortFullError) and error.may_pass:
                raise NoRoom(error) from None
            raise
        self._begin_next()

    def end(self) -> None:
        """Let nothing more be added: what is there now is the run's last unit, or nothing is to be committed at all."""
        with self._alone:
            self._over = True

    @property
    def _alone(self) -> threading.RLock:
        """The lock of this unit, to be taken; Celery's code around a body lets an event loop go on until it is free."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            turns.wait_for(self._lock)
        return self._lock

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        """Keep other threads out for the block; raise IllegalMoveError where what it adds would never be committed."""
        with self._alone if self._pid == os.getpid() else nullcontext():  # a copy of the lock may be held for ever
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
            self.check_not_apart("unit()")
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
            self.check_not_apart("unit() or checkpoint()")
            if self.steps is not None:
                self.steps.join()
            is_block, before = before is not None, before or self.unit.copy()
            try:
                self._lend(transaction, before, is_block=is_block)
            except BaseException as error:
                self._go_back_from_block(before, error)
                raise

    def _lend(self, transaction: Any, before: Unit, *, is_block: bool, step: str | None = None) -> None:
        """Write the unit, of a `step` or of the body, into the caller's transaction."""
        borrowed = self.runtime.connections.borrow(transaction)
        what = f"job.unit(), checkpoint() or step() of job {self.hold.job_id}"
        if borrowed.autocommit:
            raise IllegalMoveError(
                f"{what} was given a connection in autocommit: begin a transaction on it, so that your rows and the "
                "unit can commit together."
            )
        if borrowed.never_commits:
            raise IllegalMoveError(
                f"{what} was given the connection of a Django TestCase, whose transaction is never committed. Use a "
                "TransactionTestCase for this test."
            )
        try:
            number, follow = runs.commit_with(self.runtime, self.hold, self.unit, borrowed)
        except PortFullError as error:
            if error.may_pass:
                raise NoRoom(error) from None
            raise
        heard = borrowed.watch_commit()
        unhooked = None if borrowed.tells_of_commits else follow  # asked now: Django would open a closed connection
        self._lent = LentUnit(self.hold.job_id, borrowed, number, before, is_block, unhooked, heard, step)

    def _begin_lending(self, transaction: Any) -> None:
        """Settle, and refuse a block that would do again what the last one has done."""
        self.settle()
        self._lenders = owners(transaction)
        if self._block_unheard:
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
            self._block_unheard = False

    def finish(self, *, completes: bool = False) -> None:
        """Settle as the body ends; raises UnitNotCommittedError if its last block was not committed.

        `completes`: the body has returned. If it has come to the wait of a step, the run ends in that, whatever the
        body has done since.
        """
        with self._alone:
            if self._rest is not None:
                self.unit, self._rest = self._rest, None
                raise Suspend(self.hold.job_id)
            self.settle()
            self._check_done(ending=True)
            if completes and self.steps is None and self.hold.row.has_steps is not None:
                self.steps = Steps(self)
            if self.steps is not None:
                self.steps.end(completes=completes)

    def check_rest(self) -> None:
        """Raise Suspend if the body has come to the wait of a step, and gone on."""
        if self._rest is not None:
            raise Suspend(self.hold.job_id)

    def repeats(self, step: str) -> bool:
        """Tell whether the body comes again to the step whose transaction was not committed, or without an answer.

        It tells so once. Raises UnitNotCommittedError if the body comes to another step, or has left a block of
        `job.unit()` behind.
        """
        unheard, self._step_unheard = self._step_unheard, None
        if self._undone is None:
            return unheard == step
        if self._undone.step != step:
            self._check_done(ending=True)
        self._undone = None
        return True

    def _check_done(self, *, ending: bool = False) -> None:
        undone = self._undone
        if undone is not None and (undone.has_inputs or ending) and not self.in_block:
            self._undone = None
            self.go_back(Unit(self.unit.surviving(self.hold.job_id), serial=self.unit.serial))
            raise undone.error() from undone.cause

    def settle(self) -> None:
        """Learn what became of a unit that was written into the caller's transaction, or whose commit was interrupted.

        Raises IllegalMoveError while that transaction is still open: its lock on the job would hold up the run.
        """
        if self._committing is not None:
            self._settle_interrupted(self._committing)
        if self._lent is not None:
            self._settle_lent(self._lent)

    def _settle_interrupted(self, number: int) -> None:
        if runs.was_applied(self.runtime, self.hold, number):
            self._applied(number)
            return
        self._committing = None
        if self._whole is not None:
            self._go_back_to_whole()
        elif self.is_apart:
            self._leave_apart()

    def _settle_lent(self, lent: LentUnit) -> None:
        """Ask the store: hooks may have told of a savepoint, or of a session's commit that was not the outermost."""
        if lent.is_open(self.runtime.connections):
            raise lent.still_open()
        applied = runs.is_applied(self.runtime, self.hold)
        self._lent = None
        if not applied:
            if lent.step is None:
                self.go_back(lent.before)
            else:
                self._leave_apart()
            self._undone = lent.rolled_back(self.unit)
            return
        self._applied(self.hold.unit_no)
        reach("unit:after-commit")
        unheard = not lent.commit_was_heard()
        if lent.step is None:
            self._block_unheard = unheard
        else:
            reach(f"step[{lent.step}]:after-commit")
            # The body may repeat a step: then it finds the record. So it need not be told, as of a block.
            self._block_unheard, self._step_unheard = False, lent.step if unheard else None
        if lent.follow is not None:
            lent.follow()

    def _applied(self, number: int) -> None:
        self.hold.unit_no = number + 1
        self.hold.started = True
        self._undone = None
        self._begin_next()

    def _begin_next(self) -> None:
        """Go on with the next unit. A time limit may strike meanwhile: then all of this is repeated."""
        done, then = self.unit, self._own or Unit()
        then.took |= done.took  # what a run took stays taken until it ends
        self.seen.begin_next()
        self.turns_over = self.turns_over and bool(then.read)
        self.startup = self.startup and (0, 0)
        if self.steps is not None:
            self.steps.applied(done.changes)
        self.children.begin_next()
        self._ahead.begin_next(then.read)
        # Python handles signals after calls only, so these are assigned together.
        self.unit, self._own, self._whole, self._committing = then, None, None, None
        if self.steps is not None:
            self.steps.report()

    def report(self, record: KeepStep, how: RunEnd) -> None:
        """Report a step that this run has done or failed to do; receivers of signals are outside of the run."""
        with within(None):
            measuring.step_ended(self.runtime, self.hold, record, how)

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
        could not be ended otherwise. A commit that a task or a thread of the body has begun is over before.
        """
        with self._alone:
            if self._lent is not None and self._lent.is_open(self.runtime.connections):
                self._lent.roll_back()
            self.settle()
            self._undone, self._rest = None, None
            left = self.unit.surviving(self.hold.job_id)
            if self.steps is not None:
                left += self.steps.unfinished()
            self.unit = Unit(left, took=self.unit.took)

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
        if reading and self.turn is None and not self.in_block:
            self._block_unheard = False

    # -- apart from the body -------------------------------------------------------------------------------------

    def begin_body(self) -> None:
        """Take note that the body begins: what was done before it is the startup's."""
        self.startup = len(self.unit.changes), len(self.unit.read)

    @contextmanager
    def apart(self, first: Callable[[], None]) -> Iterator[None]:
        """Set aside what the body has done: the unit of the block is a step's. It is committed, or leaves no trace.

        `first` is done before. Raises IllegalMoveError if another task or thread of the body is in a step or a block.
        """
        with self._in_progress():
            self.check_alone()
            first()
            self._own, self.unit = self.unit, Unit(took=self.unit.took)
        try:
            yield
        finally:
            if self.is_apart and not self.in_doubt and self._pid == os.getpid():
                with self._alone:
                    self._leave_apart()

    @property
    def is_apart(self) -> bool:
        """Whether the unit is a step's."""
        return self._own is not None

    @property
    def in_doubt(self) -> bool:
        """Whether it is not known yet what becomes of the last commit."""
        return self._committing is not None or self._lent is not None

    def check_alone(self) -> None:
        """Raise IllegalMoveError where no step may begin: in a step, and in a block of `job.unit()`."""
        job_id = self.hold.job_id
        if self.is_apart:
            raise IllegalMoveError(
                f"A step of job {job_id} inside a step, or in two threads or tasks at a time: call the function "
                "plainly there, or make two steps in the body."
            )
        if self.in_block:
            raise IllegalMoveError(
                f"A step of job {job_id} inside a block of job.unit(): leave that block first, or give the step your "
                "transaction, as in job.step(name, transaction=session)."
            )

    def check_not_apart(self, what: str) -> None:
        """Raise IllegalMoveError in a step, where the body has no unit to commit or to leave."""
        if self.is_apart and not self.in_doubt:
            raise IllegalMoveError(
                f"{what} of job {self.hold.job_id} inside a step: do it in the body, before or after the step."
            )

    def commit_apart(self, write: Callable[[], None] | None = None) -> None:
        """Apply the unit of the step, by `write` if that is given, and go on with what the body has done before."""
        with self._in_progress():
            self._apply(write or partial(self._commit, "step"))

    def commit_before(self, first: Unit, then: Unit) -> None:
        """Apply a part of what the body has done, and go on with the rest."""
        with self._in_progress():
            self._whole = self.unit
            self.unit, self._own = first, then
            try:
                self._apply(partial(self._commit, "step"))
            finally:
                if self._committing is None:
                    self._go_back_to_whole()

    def _go_back_to_whole(self) -> None:
        """Go back to the unit of which a part was to be committed first, unless that was done."""
        whole, self._whole = self._whole, None
        if whole is not None:
            self.unit, self._own = whole, None

    def lend_apart(self, transaction: Any, step: str) -> None:
        """Write the unit of the step into the caller's transaction; it counts once that is committed."""
        with self._in_progress():
            self._lenders = owners(transaction)
            self._lend(transaction, self.unit, is_block=True, step=step)

    def rest(self, *changes: Change) -> NoReturn:
        """End the run in a wait: the step's own unit is committed, if the body is in one, and these changes.

        What the body did outside of steps is thrown away, because the next run does it again; but the job's own
        termination is applied.
        """
        with self._in_progress():
            own, unit = (self.unit, Unit()) if self._own is None else (self._own, self.unit)
            ends = [change for change in own.surviving(self.hold.job_id) if isinstance(change, Terminate)]
            unit.changes = [*ends, *unit.changes, *changes]
            unit.took = unit.took or own.took
            self.unit, self._own, self._rest = own, None, unit
        raise Suspend(self.hold.job_id)

    def drop(self) -> None:
        """Forget what a step has done, but for entries of the job's history; what it had read is read again."""
        with self._in_progress():
            read = {packet for _, packet in self.unit.read}
            self.unit = Unit(self.unit.surviving(self.hold.job_id), took=self.unit.took)
            self._ahead.unread(read)

    def _leave_apart(self) -> None:
        """Go back to what the body has done before a step that is not kept."""
        assert self._own is not None
        self.drop()
        self._own.changes += self.unit.changes
        self._own.took |= self.unit.took
        self.unit, self._own = self._own, None

    def _check_apart(self, own: Sequence[Change], change: Change) -> None:
        """Refuse in a step what goes with something that the body has done, and that is applied after the step."""
        job_id = getattr(change, "job_id", getattr(change, "parent_id", None))
        if job_id in view.new_jobs(own):
            raise IllegalMoveError(
                f"Job {job_id} was made outside of steps, and is there when the run of job {self.hold.job_id} "
                "completes: make it in a step, or do this outside of the step."
            )
        both = view.keys_set([change]) & view.keys_set(own)
        if both:
            raise IllegalMoveError(
                f"A step sets {min(both)[1]!r} in the state of job {job_id}, which the body has set before, outside of "
                "steps: that would be applied after this. Set both in steps, or both outside."
            )

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, change: Change) -> None:
        """Have the next commit apply `change`."""
        with self._in_progress():
            self.settle()
            self._go_on()
            if self._own is not None:
                self._check_apart(self._own.changes, change)
            self.unit.changes.append(change)
            self._ahead.some_configured |= isinstance(change, ConfigurePorts)

    # -- reading its own writes ----------------------------------------------------------------------------------

    @property
    def changes(self) -> list[Change]:
        """What this unit will apply, in order; in a step with what the body has done before.

        A unit in the caller's transaction is settled once that is over.
        """
        if self._lent is not None and not self._lent.is_open(self.runtime.connections):
            self.settle()
        return self.unit.changes if self._own is None else [*self._own.changes, *self.unit.changes]

    def inputs_memo(self) -> dict[str, Any]:
        """Return with which defaults `for_inputs` has called the body already, as this unit leaves it."""
        text = jobs.inputs_memo(self.runtime.connections, self.hold.job_id)
        for change in self.unit.changes:
            if isinstance(change, RememberInputs):
                text = change.memo
        memo: dict[str, Any] = json.loads(text or "{}")
        return memo

    # -- packets -------------------------------------------------------------------------------------------------

    def begun_turns(self) -> set[str]:
        """Return what the turns are found by in which earlier runs have left steps, and which no commit has ended."""
        if self.steps is None and self.hold.row.has_steps:
            self.steps = Steps(self)
        return self.steps.begun_turns if self.steps is not None else set()

    def head(self, key: PortKey) -> int | None:
        """Return the id of the packet that `has_packet` has found in the store."""
        return self._ahead.head(key)

    def note_reader(self, key: PortKey) -> None:
        """Take note that the body reads from a port, unless a step does."""
        if key[:2] == (self.hold.job_id, "in") and not self.is_apart:
            self.reads.add(key[2])

    def next_packet(self, key: PortKey, *, many: bool) -> Any | None:
        """Read the next packet of a port as part of this unit; None if there is none."""
        with self._in_progress():
            self.note_reader(key)
            self.settle()
            self._check_done()
            self._go_on(reading=True)
            found = self._ahead.next(self.unit, key, many=many)
            return found if found is not None else self._own_packet(key)

    def reading(self, work: Callable[[], R]) -> Parts[tuple[R, Sequence[tuple[int, int]]]]:
        """Return what `work` returns, and the packets that it has read.

        If its caller is interrupted meanwhile, or it fails, they are read again.
        """
        read: list[tuple[int, int]] = []

        def noted() -> R:
            with self._in_progress():
                self.settle()
                before = len(self.unit.read)
                try:
                    return work()
                finally:
                    read.extend(self.unit.read[before:])

        try:
            return (yield noted), read
        except BaseException:
            with self._alone:
                self._unread(read)
            raise

    def _unread(self, packets: Sequence[tuple[int, int]]) -> None:
        for unit in (self.unit, self._own):
            if unit is not None and packets:
                unit.read = [packet for packet in unit.read if packet not in packets]
        self._ahead.unread({packet for _, packet in packets})

    def drain(self, key: PortKey, most: int | None = None) -> list[Any]:
        """Read all packets of a port as part of this unit, or `most`, in two statements at most."""
        with self._in_progress():
            self.note_reader(key)
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


def within(unit: OpenUnit | None) -> AbstractContextManager[None]:
    """Make this the unit of whatever asks and reads in the block; with None that is outside of runs."""
    return native.within(_active, unit)


def submit(runtime: Runtime, name: str, *changes: Change, transaction: Any = None) -> Applied | None:
    """Have changes applied: by the commit of the run in progress here, else now or in the caller's transaction.

    Returns None if they are left to the commit of a run.
    """
    unit = active()
    if unit is None or transaction is not None:
        return carry_out(runtime, name, changes, transaction)
    for change in changes:
        unit.add(change)
    return None

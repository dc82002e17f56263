"""The unit of the run in progress: what it has read ahead, and what it will write at its next commit.

No transaction is open while user code runs. A unit reads its own writes: whoever asks inside the run sees what the
commit will make of the store. One thread runs one job at a time; the unit belongs to that thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from .model.changes import (
    AddAlias,
    Adopt,
    Change,
    ConfigurePorts,
    Direction,
    Disown,
    NewJob,
    PortRow,
    RemoveAlias,
    SetChannels,
    SetDefault,
    SetState,
    UnsetState,
    Write,
)
from .model.errors import IllegalMoveError, LeaseLostError
from .operations import runs
from .operations.runs import Hold, Unit
from .operations.runtime import Runtime
from .store import claims, packets, ports, state
from .store.borrowed import Borrowed, is_open

READ_AHEAD = 100

PortKey = tuple[int, Direction, str]


@dataclass(slots=True)
class _Buffer:
    """Rows of a port, oldest first: those read ahead, and those that this unit has read."""

    ahead: deque[Any] = field(default_factory=deque)
    read: list[Any] = field(default_factory=list)

    @property
    def seen(self) -> list[int]:
        """The ids of the packets this unit has read."""
        return [row.id for row in self.read]


@dataclass(frozen=True, slots=True)
class _Lent:
    """A unit in the caller's transaction: what to go back to if that is rolled back."""

    borrowed: Borrowed
    number: int
    before: Unit
    follow: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A packet as it was read: its JSON texts, and when it was written (None in the unit that wrote it)."""

    value: str
    context: str | None
    options: str | None
    written_at: Any = None


class OpenUnit:
    """What the run in progress has read and will write."""

    def __init__(self, runtime: Runtime, hold: Hold) -> None:
        self.runtime = runtime
        self.hold = hold
        self.unit = Unit()
        self.job: Any = None
        self.children: list[Any] | None = None
        self.stopping: Callable[[], bool] = lambda: False
        self._buffers: dict[int, _Buffer] = {}
        self._ports: dict[int, dict[tuple[str, str], Any]] = {}
        self._fresh_ports: set[int] = set()
        self._lent: _Lent | None = None

    # -- committing ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the children as the run begins; `children` shows these until the first commit.

        So a body that sees a child's end sees all ends that need no further run, and no other.
        """
        self.children = runs.look(self.runtime, self.hold)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the unit of whatever asks and reads in the block."""
        token = ACTIVE.set(self)
        try:
            yield
        finally:
            ACTIVE.reset(token)

    def commit(self) -> None:
        """Apply the unit, and begin the next."""
        self.settle()
        with outside_of_runs():  # what follows the commit, such as receivers of signals, is no part of the next unit
            runs.commit(self.runtime, self.hold, self.unit)
        self._begin_next()

    def commit_with(self, transaction: Any, before: Unit | None = None) -> None:
        """Write the unit into the caller's transaction; it counts once that is committed.

        After a rollback the run goes on from `before` the block (by default from what is there now).
        """
        self.settle()
        before = before or self.unit.copy()
        borrowed = self.runtime.connections.borrow(transaction)
        try:
            if borrowed.autocommit:
                raise IllegalMoveError(
                    f"job.unit() or checkpoint() of job {self.hold.job_id} was given a connection in autocommit: begin "
                    "a transaction on it, so that your rows and the unit can commit together."
                )
            number, follow = runs.commit_with(self.runtime, self.hold, self.unit, borrowed)
        except BaseException:
            self.go_back(before)
            raise
        self._lent = _Lent(borrowed, number, before, follow)

    def settle(self) -> None:
        """Learn what became of a unit that was written into the caller's transaction.

        Raises IllegalMoveError while that transaction is still open: its lock on the job would hold up the run. What
        hooks tell is not enough: a savepoint may have been rolled back, or a session's commit may not be the outermost.
        """
        lent = self._lent
        if lent is None:
            return
        if is_open(self.runtime.connections, lent.number):
            raise IllegalMoveError(
                f"The transaction given to job.unit() or checkpoint() of job {self.hold.job_id} is still open: commit "
                "or roll it back before the run goes on."
            )
        applied = runs.is_applied(self.runtime, self.hold)
        self._lent = None
        if applied:
            self.hold.unit_no += 1
            self.hold.started = True
            self._begin_next()
            if not lent.borrowed.tells_of_commits:
                lent.follow()
        else:
            self.go_back(lent.before)

    def _settle_if_over(self) -> None:
        """Settle before a look at the store: while the transaction is open, the unit is still all there is to see."""
        if self._lent is not None and not is_open(self.runtime.connections, self._lent.number):
            self.settle()

    def _begin_next(self) -> None:
        self.unit = Unit(took=self.unit.took)  # what a run took stays taken until it ends
        self.children = None
        for kept in self._buffers.values():
            kept.read.clear()
        self._fresh_ports.clear()
        for job_id in list(self._ports):
            if any(row.id is None for row in self._ports[job_id].values()):
                del self._ports[job_id]

    def go_back(self, before: Unit) -> None:
        """Forget what this unit did since the snapshot `before` was taken; what it had read is read again.

        If a commit came in between, what the snapshot holds is applied already: the whole unit since then is forgotten.
        """
        if before.serial != self.unit.serial:
            before = Unit(serial=self.unit.serial)
        before.took = before.took or self.unit.took  # taken packets stay taken until the run ends, and are freed then
        unread = {packet for _, packet in self.unit.read} - {packet for _, packet in before.read}
        self.unit = before
        for kept in self._buffers.values():
            kept.ahead.extendleft(reversed([row for row in kept.read if row.id in unread]))
            kept.read = [row for row in kept.read if row.id not in unread]

    def discard(self) -> None:
        """Forget what was not committed: the run raised.

        A transaction that the body left open, with the unit and the lock on the job in it, is rolled back: the run
        could not be ended otherwise.
        """
        if self._lent is not None and is_open(self.runtime.connections, self._lent.number):
            self._lent.borrowed.give_up()
        self.settle()
        self.unit = Unit(took=self.unit.took)

    def renew(self) -> None:
        """Move the run's own deadline, and raise LeaseLostError if it is no longer the job's current run."""
        hold = self.hold
        claims.touch(self.runtime.connections, hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id)
        self.still_ours()

    def still_ours(self) -> None:
        """Raise LeaseLostError if the run is no longer the job's current one."""
        row = claims.outcome(self.runtime.connections, self.hold.job_id)
        hold = self.hold
        if row is None or (row.run_no, row.worker_id) != (hold.run_no, hold.worker_id) or row.unit_no is None:
            raise LeaseLostError(f"Run {hold.run_no} of job {hold.job_id} is no longer its current run.")

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, change: Change) -> None:
        """Have the next commit apply `change`."""
        self.settle()
        self.unit.changes.append(change)

    def new_jobs(self) -> dict[int, NewJob]:
        """Return the jobs this unit will create."""
        self._settle_if_over()
        return {change.id: change for change in self.unit.changes if isinstance(change, NewJob)}

    # -- reading its own writes ----------------------------------------------------------------------------------

    def state(self, job_id: int, key: str | None = None) -> dict[str, str]:
        """Return a job's state as this unit leaves it, {key: JSON text}."""
        self._settle_if_over()
        new = self.new_jobs().get(job_id)
        found = dict(new.state) if new else state.read(self.runtime.connections, job_id, key)
        for change in self.unit.changes:
            if isinstance(change, SetState) and change.job_id == job_id:
                found.update(change.values)
            elif isinstance(change, UnsetState) and change.job_id == job_id:
                for gone in change.keys:
                    found.pop(gone, None)
        return found

    def family(self, parent_id: int) -> tuple[dict[str, int], set[int]]:
        """Return the children this unit gives a job, {name: id}, and the ids or names it takes away."""
        self._settle_if_over()
        gained: dict[str, int] = {}
        gone: set[Any] = set()
        for change in self.unit.changes:
            match change:
                case NewJob() if change.parent_id == parent_id and change.child_name is not None:
                    gained[change.child_name] = change.id
                case Adopt() if change.parent_id == parent_id:
                    gained[change.name] = change.child_id
                case Disown() if change.parent_id == parent_id:
                    gone.add(change.child)
                    gained = {name: child for name, child in gained.items() if change.child not in (name, child)}
                case _:
                    pass
        return gained, gone

    def aliases(self, job_id: int | None = None) -> tuple[dict[str, int], set[str]]:
        """Return the aliases this unit gives, {name: job id}, and those it takes away; of one job, or of all."""
        self._settle_if_over()
        given: dict[str, int] = {}
        taken: set[str] = set()
        for change in self.unit.changes:
            match change:
                case NewJob() if job_id in (None, change.id):
                    given.update(dict.fromkeys(change.aliases, change.id))
                case AddAlias() if job_id in (None, change.job_id):
                    given[change.name] = change.job_id
                case RemoveAlias() if job_id in (None, change.job_id):
                    given.pop(change.name, None)
                    taken.add(change.name)
                case _:
                    pass
        return given, taken

    def ports(self, job_id: int, *, fresh: bool = False) -> dict[tuple[str, str], Any]:
        """Return a job's ports as this unit leaves them, {(direction, name): row}; a row not yet stored has no id."""
        self._settle_if_over()
        new = self.new_jobs().get(job_id)
        if new is not None:
            known: dict[tuple[str, str], Any] = {
                (port.direction, port.name): unstored(job_id, port) for port in new.ports
            }
        else:
            if job_id not in self._ports or (fresh and job_id not in self._fresh_ports):
                rows = ports.of_jobs(self.runtime.connections, [job_id])
                self._ports[job_id] = {(row.direction, row.name): row for row in rows}
                self._fresh_ports.add(job_id)
            known = dict(self._ports[job_id])
        for change in self.unit.changes:
            match change:
                case ConfigurePorts() if change.job_id == job_id:
                    known = {
                        (port.direction, port.name): _over(known.get((port.direction, port.name)), job_id, port)
                        for port in change.ports
                    }
                case SetDefault() if change.job_id == job_id:
                    _amend(known, change.direction, change.port, job_id, default=change.value)
                case SetChannels() if change.job_id == job_id:
                    _amend(known, change.direction, change.port, job_id, channels=change.channels)
                case Write(as_default=True) if change.job_id == job_id:
                    _amend(known, change.direction, change.port, job_id, default=change.packets[-1][0])
                case _:
                    pass
        return known

    # -- packets -------------------------------------------------------------------------------------------------

    def next_packet(self, key: PortKey, port_id: int | None, *, many: bool) -> Written | None:
        """Read the next packet of a port as part of this unit; None if there is none."""
        self.settle()
        if port_id is not None:
            kept = self._ahead(key, port_id, many)
            if kept.ahead:
                row = kept.ahead.popleft()
                kept.read.append(row)
                self.unit.read.append((port_id, row.id))
                return Written(row.value, row.context, row.options, row.written_at)
        return self._own_packet(key)

    def peek(self, key: PortKey, port_id: int | None, limit: int) -> list[Written]:
        """Return the next packets without reading them."""
        self._settle_if_over()
        found: list[Written] = []
        if port_id is not None:
            kept = self._buffers.get(port_id, _Buffer())
            rows = [*kept.ahead] if key[0] != self.hold.job_id else []
            if len(rows) < limit:
                rows += packets.read_ahead(
                    self.runtime.connections, port_id, seen=self._hidden(port_id) + [row.id for row in rows],
                    limit=limit - len(rows),
                )  # fmt: skip
            found = [Written(row.value, row.context, row.options, row.written_at) for row in rows]
        found += [Written(*packet) for write in self._writes(key) for packet in write.packets]
        return found[:limit]

    def count(self, key: PortKey, port_id: int | None) -> int:
        """Return how many packets wait on a port."""
        self._settle_if_over()
        waiting = sum(len(write.packets) for write in self._writes(key))
        if port_id is None:
            return waiting
        if key[0] != self.hold.job_id and port_id in self._buffers:
            waiting += len(self._buffers[port_id].ahead)  # taken by this run, so no longer counted as free
        return waiting + packets.count(self.runtime.connections, port_id, seen=self._hidden(port_id))

    def has_packet(self, key: PortKey, port_id: int | None) -> bool:
        """Tell whether a read would find a packet."""
        self._settle_if_over()
        if port_id is not None and self._ahead(key, port_id, many=False).ahead:
            return True
        return any(write.packets for write in self._writes(key))

    def _hidden(self, port_id: int) -> list[int]:
        return self._buffers[port_id].seen if port_id in self._buffers else []

    def _ahead(self, key: PortKey, port_id: int, many: bool) -> _Buffer:
        """Fill the buffer of a port if it is empty.

        A job's own input ports are only looked at: nobody else reads them for good without taking. Packets of other
        ports are taken for this run, exactly as many as will be read.
        """
        kept = self._buffers.setdefault(port_id, _Buffer())
        if kept.ahead:
            return kept
        rows: Sequence[Any]
        if key[0] == self.hold.job_id and key[1] == "in":
            rows = packets.read_ahead(self.runtime.connections, port_id, seen=kept.seen, limit=READ_AHEAD)
        else:
            hold = self.hold

            def take(executor: Any) -> list[Any]:
                return packets.take(
                    executor, port_id, job_id=hold.job_id, run_no=hold.run_no, limit=READ_AHEAD if many else 1
                )

            rows = self.runtime.connections.transact("take", take)
            self.unit.took = self.unit.took or bool(rows)
        kept.ahead.extend(rows)
        return kept

    def _writes(self, key: PortKey) -> list[Write]:
        return [
            change
            for change in self.unit.changes
            if isinstance(change, Write)
            and (change.job_id, change.direction, change.port) == key
            and not change.as_default
        ]

    def _own_packet(self, key: PortKey) -> Written | None:
        """Read back the oldest packet that this very unit wrote: it is then never stored."""
        for write in self._writes(key):
            if write.packets:
                place = next(n for n, change in enumerate(self.unit.changes) if change is write)
                self.unit.changes[place] = replace(write, packets=write.packets[1:])
                return Written(*write.packets[0])
        return None


@dataclass(frozen=True, slots=True)
class _PortView:
    """A port's row as a unit sees it."""

    id: int | None
    job_id: int
    direction: str
    name: str
    default_value: str | None
    channels: Sequence[str]


def unstored(job_id: int, port: PortRow) -> _PortView:
    """Return a port as it will be stored."""
    return _PortView(None, job_id, port.direction, port.name, port.default, port.channels)


def _over(row: Any, job_id: int, port: PortRow) -> _PortView:
    return replace(unstored(job_id, port), id=row.id if row is not None else None)


def _amend(known: dict[Any, Any], direction: str, name: str, job_id: int, **changed: Any) -> None:
    row = known.get((direction, name))
    view = _PortView(
        row.id if row else None,
        job_id,
        direction,
        name,
        row.default_value if row else None,
        row.channels if row else (),
    )
    if "default" in changed:
        view = replace(view, default_value=changed["default"])
    if "channels" in changed:
        view = replace(view, channels=changed["channels"])
    known[direction, name] = view


ACTIVE: ContextVar[OpenUnit | None] = ContextVar("celery_sidejob_open_unit", default=None)
"""The unit of the run that this thread (or greenlet) is in."""


@contextmanager
def outside_of_runs() -> Iterator[None]:
    """Within the block no run is in progress here: what is asked happens at once."""
    token = ACTIVE.set(None)
    try:
        yield
    finally:
        ACTIVE.reset(token)


def active() -> OpenUnit | None:
    """Return the open unit of the run in progress here, None outside of runs."""
    return ACTIVE.get()

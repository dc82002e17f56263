"""A job's port: a mailbox whose packets have the order of their commits, and perhaps a default; `port_options`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Any

from ..awaiting import AioOf, Parts, Pause, here
from ..model import native, values
from ..model.changes import Change, Connect, Direction, PortKey, SetChannels, SetDefault, Write
from ..model.checks import MOST_S, check_number, is_seconds, shown
from ..model.errors import IllegalMoveError, InvalidChannelError, InvalidPortError, InvalidValueError, PortFullError
from ..model.names import check_channels
from ..model.port import NO_DATA, WILDCARD, check_port_name, port_not_found, value_of
from ..operations.after_commit import AfterCommit
from ..operations.changes.follow_up import apply_noted_asks, follow_commit_of
from ..operations.changes.mailboxes import make_room
from ..operations.changes.unit_of_work import carry_out
from ..store import packets, ports, room
from ..store.statement import Reader, Transaction, first
from ..unit.open_unit import active, submit
from ..unit.read_ahead import FIRST_PAUSE_S, LONGEST_PAUSE_S, READ_AHEAD, behind_marks
from .log_entries import Kind, are_received, current_context, is_unlogged, note, one_entry, options_for

if TYPE_CHECKING:
    from ..aio import AioPort
    from .job import Job


@dataclass(frozen=True, slots=True)
class Packet:
    """A piece of data that came through a port."""

    value: Any
    context: dict[str, Any]
    options: dict[str, Any]
    written_at: datetime | None
    """None until the unit that wrote it is committed."""


class Port:
    """A handle of one port; equal to every other handle of it. The first use checks that the job has such a port."""

    __slots__ = ("direction", "job", "name")

    aio: AioOf[AioPort] = AioOf("AioPort")
    """The verbs as coroutines."""

    def __init__(self, job: Job, direction: Direction, name: str) -> None:
        """Check the name, without asking the store; raises InvalidPortError."""
        self.job = job
        self.direction: Direction = direction
        self.name = check_port_name(name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Port):
            return NotImplemented
        return (self.job, self.direction, self.name) == (other.job, other.direction, other.name)

    def __hash__(self) -> int:
        return hash((self.job, self.direction, self.name))

    def __repr__(self) -> str:
        return f"<Port {self.direction}:{self.name} of job {self.job.id}>"

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, value: Any, *, wait: float | bool = False, transaction: Any = None) -> None:
        """Append one value and ask the reader to run: the job of an input port, the parent of an output port's job.

        If the port has a limit and is full, a client gets PortFullError. With `wait` it first waits for room: for so
        many seconds, or with True without a limit. A run always waits: its unit is not committed, and the run begins
        again when there is room.
        """
        here(self._writing(value, wait=wait, transaction=transaction))

    def _writing(self, value: Any, *, wait: float | bool = False, transaction: Any = None) -> Parts[None]:
        wait_s = self._seconds_to_wait(wait, transaction)
        text = values.encode(value, limit=self._runtime.settings.max_value_bytes)
        yield from self._write([text], wait_s, transaction)

    def write_many(self, values_: Iterable[Any], *, wait: float | bool = False, transaction: Any = None) -> None:
        """Append values, in order, in one transaction: all of them, or none if there is no room for all.

        An error names a refused value by its index: ``values[3]``. `wait` means the same as in `write`.
        """
        here(self._writing_many(values_, wait=wait, transaction=transaction))

    def _writing_many(
        self, values_: Iterable[Any], *, wait: float | bool = False, transaction: Any = None
    ) -> Parts[None]:
        if isinstance(values_, (str, bytes, bytearray, Mapping)) or not isinstance(values_, Iterable):
            raise InvalidValueError(
                f"write_many() takes a list of values, or another iterable, not {shown(values_)}; for one value there "
                "is write()."
            )
        wait_s = self._seconds_to_wait(wait, transaction)
        limit = self._runtime.settings.max_value_bytes
        texts = [values.encode(value, limit=limit, what=f"values[{n}]") for n, value in enumerate(values_)]
        yield from self._write(texts, wait_s, transaction)

    def _write(self, texts: Sequence[str], wait_s: float, transaction: Any) -> Parts[None]:
        context = current_context(limit=self._runtime.settings.max_value_bytes)
        scope = current_port_scope()
        options = options_for(scope.log)
        written = tuple((text, context, options) for text in texts)
        if not written:
            return
        change = Write(*self._key, written, notify=scope.notify, as_default=writes_defaults())
        until, pause_s = time.monotonic() + wait_s, FIRST_PAUSE_S
        while True:
            try:
                yield lambda: self._do("write", change, transaction)
                break
            except PortFullError as error:
                left_s = until - time.monotonic()
                if left_s <= 0 or not error.may_pass:
                    raise
            yield Pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        yield lambda: self._note([("write", self._key)], texts, transaction)

    def _seconds_to_wait(self, wait: float | bool, transaction: Any) -> float:
        if wait is False or wait is True:
            wait_s = inf if wait else 0.0
        elif is_seconds(wait):
            wait_s = float(wait)
        else:
            raise InvalidValueError(f"wait= takes seconds, {MOST_S}, or True or False, not {shown(wait)}.")
        if wait_s and transaction is not None:
            raise IllegalMoveError(
                f"A write to {self.direction}put port {self.name!r} of job {self.job.id} with transaction= cannot wait "
                "for room: your transaction would stay open meanwhile. Roll it back, and write again later."
            )
        return wait_s

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, *, transaction: Any = None) -> Any:
        """Read the oldest value; if there is none, the default, any number of times; NO_DATA without either.

        With `transaction=` the packet is consumed if the transaction commits, and is on the port again if not. Until
        then other clients read the packets behind it, and a run that reaches it waits.
        """
        found, default = self._next(transaction)
        if found is None and default is not None:
            self._note([("read", self._key)], [default], transaction)
        text = found.value if found is not None else default
        return NO_DATA if text is None else values.decode(text)

    def read_packet(self, *, transaction: Any = None) -> Packet | None:
        """Read the oldest packet with its context, as `read` does; never returns the default."""
        found, _ = self._next(transaction)
        return None if found is None else _packet(found)

    def read_many(self, limit: int, *, transaction: Any = None) -> list[Any]:
        """Read the oldest values, at most `limit`, in one transaction and one statement; never returns the default.

        The values are consumed together: a client that dies before it gets the answer may have lost all of them. With
        `transaction=` all are consumed if the transaction commits. If a value cannot be decoded, a client gets
        InvalidValueError and consumes none.
        """
        check_number("limit", limit, least=1, of="packets")
        unit, executor = active(), None
        if unit is None or transaction is not None:
            found, read, executor = self._popped(transaction, limit)
        else:
            found = unit.drain(self._key, limit)
            read = [values.decode(row.value) for row in found if row.value is not None]
        if not found:
            self._row(executor)
        self._note_packets([row for row in found if row.value is not None], transaction)
        return read

    def __iter__(self) -> Iterator[Any]:
        """Read values until the port is empty; never yields the default.

        A client reads each value in a transaction of its own: if the client dies, only the value just read is lost.
        `read_many` is faster.
        """
        while (found := self._next(many=True)[0]) is not None:
            yield values.decode(found.value)

    def peek(self, limit: int = READ_AHEAD) -> list[Packet]:
        """Return the next packets without reading them."""
        check_number("limit", limit, of="packets")
        unit = active()
        if unit is not None:
            found = unit.peek(self._key, limit)
        else:
            found = packets.peek(self._runtime.connections, self._key, limit=limit)
        if not found:
            self._row()
        return [_packet(packet) for packet in found]

    def __len__(self) -> int:
        """Return how many packets wait; a default does not count. Reads them all: for a million half a second."""
        unit = active()
        found = unit.count(self._key) if unit is not None else packets.count(self._runtime.connections, self._key)
        if not found:
            self._row()
        return found

    def __bool__(self) -> bool:
        """True, even if the port is empty."""
        return True

    @property
    def has_data(self) -> bool:
        """Whether `read` would return a value: a packet waits, or there is a default."""
        return bool(self.peek(1)) or self.has_default

    # -- moving --------------------------------------------------------------------------------------------------

    def connect_to(self, *targets: Port, transaction: Any = None) -> list[Any]:
        """Move all packets to each of the other ports, in order, and copy the default to them; return their values.

        All happens in one transaction, or not at all; in a run it is a part of the unit. The packets keep their
        contexts and options. If a port gets packets or another default, its reader is asked to run once. Packets that
        are moved to an output port are published on its channels. If this port has no default, the targets keep theirs.
        """
        self._check_targets(targets)
        keys = tuple(port._key for port in targets)
        notify, unit = current_port_scope().notify, active()
        if unit is None or transaction is not None:
            self._refuse_to_read_in(transaction)
            applied = carry_out(self._runtime, "connect", [Connect(self._key, keys, notify=notify)], transaction)
            self._note_packets(applied.mailboxes.moved, transaction, keys)
            return [values.decode(row.value) for row in applied.mailboxes.moved]
        for port in targets:
            if not unit.seen.knows_port(port._key):
                port._row()
        default = self._row().default_value
        found = unit.drain(self._key)
        moved = [values.decode(row.value) for row in found]
        written = tuple((row.value, row.context, row.options) for row in found)
        for key in keys:
            if written:
                unit.add(Write(*key, written, notify=notify))
            if default is not None:
                unit.add(SetDefault(*key, default, notify=notify))
        self._note_packets(found, None, keys)
        return moved

    def _check_targets(self, targets: tuple[Port, ...]) -> None:
        if not targets:
            raise InvalidPortError(f"{self!r}.connect_to() needs the ports to which its packets are moved.")
        for port in targets:
            if not isinstance(port, Port):
                raise InvalidPortError(f"{self!r}.connect_to() takes ports, such as job.input('a'), not {port!r}.")
            if port == self:
                raise InvalidPortError(f"{self!r} cannot be connected to itself.")
        if len(set(targets)) < len(targets):
            raise InvalidPortError(f"{self!r}.connect_to() was given a port twice; it gets each packet once.")

    # -- default and channels ------------------------------------------------------------------------------------

    @property
    def default(self) -> Any:
        """The value that an empty port reads as; NO_DATA without a default. Setting it asks no job to run."""
        text = self._row().default_value
        return NO_DATA if text is None else values.decode(text)

    @default.setter
    def default(self, value: Any) -> None:
        limit = self._runtime.settings.max_value_bytes
        text = None if value is NO_DATA else values.encode(value, limit=limit, what=f"default of port {self.name!r}")
        self._do("default", SetDefault(self.job.id, self.direction, self.name, text))

    @default.deleter
    def default(self) -> None:
        self._do("default", SetDefault(self.job.id, self.direction, self.name, None))

    @property
    def has_default(self) -> bool:
        """Whether there is a default; null counts as a default."""
        return self._row().default_value is not None

    @property
    def channels(self) -> list[str]:
        """The channels to which an input port subscribes, or on which an output port's values are published."""
        return list(self._row().channels)

    @channels.setter
    def channels(self, names: Iterable[str]) -> None:
        if isinstance(names, str) or names is None:
            raise InvalidChannelError(f"channels takes a list of channel names, not {names!r}.")
        checked = check_channels(names)
        self._do("channels", SetChannels(self.job.id, self.direction, self.name, checked))

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> PortKey:
        return (self.job.id, self.direction, self.name)

    @property
    def _runtime(self) -> Any:
        return self.job._runtime

    def _do(self, name: str, change: Change, transaction: Any = None) -> None:
        """Have a change of the port applied; a run checks here whether its commit would refuse the change."""
        unit = active()
        if unit is not None and transaction is None and not unit.seen.knows_port(self._key):
            self._row()
        submit(self._runtime, name, change, transaction=transaction)

    def _next(self, transaction: Any = None, *, many: bool = False) -> tuple[Any | None, str | None]:
        """Read the oldest packet; if there is none, return None and the default."""
        found, default = self._taken(transaction, many)
        if found is not None:
            self._note_packets([found], transaction)
        return found, default

    def _note_packets(self, read: Sequence[Any], transaction: Any, targets: Sequence[PortKey] = ()) -> None:
        """Make one log entry for packets that were read and moved to other ports, but for packets that make none."""
        texts = [row.value for row in read if not is_unlogged(row.options)]
        if texts:
            self._note([("read", self._key), *(("write", target) for target in targets)], texts, transaction)

    def _note(self, uses: Sequence[tuple[Kind, PortKey]], texts: Sequence[str], transaction: Any) -> None:
        """Note values for the log, unless the surrounding block says otherwise, or nobody would receive the entry."""
        if current_port_scope().log and are_received(self._runtime, transaction):
            note(self._runtime, uses, texts, transaction)

    def _taken(self, transaction: Any, many: bool) -> tuple[Any | None, str | None]:
        unit = active()
        if unit is not None and transaction is None:
            packet = unit.next_packet(self._key, many=many)
            return packet, None if packet is not None else self._row().default_value
        popped, _, executor = self._popped(transaction, 1)
        row = first(popped)
        if row is not None and row.id is not None:
            return row, None
        return None, (row or self._row(executor)).default_value

    def _popped(self, transaction: Any, limit: int) -> tuple[Sequence[Any], list[Any], Reader]:
        """Read and remove the oldest packets, outside of units, and ask the jobs that wait for their room.

        Returns their rows, their values, and where to ask about the port: in the caller's transaction, if that is
        given. For an empty port these are one row without a packet, and no value; no row means that there is no such
        port. Raises InvalidValueError, and removes nothing, if a value cannot be decoded.
        """
        self._refuse_to_read_in(transaction)
        key, connections = self._key, self._runtime.connections
        in_order = behind_marks(lambda executor: packets.pop(executor, key, limit=limit))

        def work(executor: Transaction) -> tuple[Sequence[Any], list[Any], AfterCommit]:
            after_commit = AfterCommit()
            popped = in_order(executor)
            read = [value_of(row, key) for row in popped if row.id is not None]  # before the commit, which removes them
            make_room(executor, room.limited(popped), after_commit)
            return popped, read, after_commit

        if transaction is None:
            popped, read, after_commit = connections.transact("take", work)
            apply_noted_asks(self._runtime, after_commit.noted)
            return popped, read, connections
        borrowed = connections.borrow(transaction)
        popped, read, after_commit = borrowed.apply(lambda: work(borrowed))
        follow_commit_of(self._runtime, borrowed, after_commit)
        return popped, read, borrowed

    def _refuse_to_read_in(self, transaction: Any) -> None:
        if transaction is not None and active() is not None:
            raise IllegalMoveError(
                f"{self.direction}put port {self.name!r} of job {self.job.id} is read with transaction= inside a "
                "run, which may have read ahead of it: read it inside of `with job.unit(transaction=...)`."
            )

    def _row(self, executor: Reader | None = None) -> Any:
        """Return the port's row as stored, or as this unit leaves it. A port allowed by `"*"` has the options of `"*"`.

        Raises PortNotFoundError if the job has no such port.
        """
        unit = active()
        if unit is None:
            rows = ports.of_job(executor or self._runtime.connections, self.job.id)
        elif (seen := unit.seen.port(self._key)) is not None:
            return seen
        else:
            rows = unit.seen.ports(self.job.id)
        rows = rows or self.job._ports_made()
        row = rows.get((self.direction, self.name)) or rows.get((self.direction, WILDCARD))
        if row is None:
            self.job._found(rows)
            raise port_not_found(self.job.id, self.direction, self.name, rows)
        return row


# -- options of a block ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PortScope:
    """How reads and writes behave inside a `port_options` block."""

    log: bool = True
    notify: bool = True
    set_default: bool | None = None
    """None: as the turn of `for_inputs` wants it."""


_PLAIN = PortScope()
_port_scope: ContextVar[PortScope] = ContextVar("celery_sidejob_port_scope", default=_PLAIN)

current_port_scope = _port_scope.get
"""Returns the settings of the surrounding `port_options` blocks."""


def writes_defaults() -> bool:
    """Tell whether a value written here is a port's default: a block says so, or a turn that has defaults only."""
    chosen, unit = _port_scope.get().set_default, active()
    return bool(chosen if chosen is not None else unit is not None and unit.has_defaults_only)


@contextmanager
def port_options(
    log: bool | None = None, notify: bool | None = None, set_default: bool | None = None
) -> Iterator[None]:
    """Change how ports behave in the block: `notify=False` asks no job to run, `set_default=True` writes defaults.

    All reads and writes of the outermost block make one entry of the log. With `log=False` they make none, and packets
    written then make none when they are read. An option that is not given is inherited from the surrounding block.
    """
    given = {"log": log, "notify": notify, "set_default": set_default}
    changed = {name: value for name, value in given.items() if value is not None}
    with native.within(_port_scope, replace(_port_scope.get(), **changed)), one_entry():
        yield


def _packet(found: Any) -> Packet:
    return Packet(
        values.decode(found.value),
        values.decode(found.context) if found.context else {},
        values.decode(found.options) if found.options else {},
        found.written_at,
    )

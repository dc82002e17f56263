"""A job's port: a mailbox with data in the order of its commits, and perhaps a default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from ..model import channel as channels_of
from ..model import values
from ..model.changes import Change, Direction, PortKey, SetChannels, SetDefault, Write
from ..model.checks import check_number
from ..model.errors import IllegalMoveError, InvalidChannelError, PortNotFoundError
from ..model.port import NO_DATA, WILDCARD, check_port_name
from ..store import packets, ports
from ..unit.open_unit import active, submit
from ..unit.read_ahead import READ_AHEAD, Written
from .scopes import current_context, current_port_scope

if TYPE_CHECKING:
    from .job import Job

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Packet:
    """A piece of data as it came through a port."""

    value: Any
    context: dict[str, Any]
    options: dict[str, Any]
    written_at: datetime | None
    """None while the unit that wrote it is not committed."""


class Port:
    """A handle of one port; equal to every other handle of it."""

    __slots__ = ("_row", "direction", "job", "name")

    def __init__(self, job: Job, direction: Direction, name: str) -> None:
        """Find the port; raises InvalidPortError for a bad name, PortNotFoundError if the job has none of this name."""
        self.job = job
        self.direction: Direction = direction
        self.name = check_port_name(name)
        self._row = self._find()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Port):
            return NotImplemented
        return (self.job, self.direction, self.name) == (other.job, other.direction, other.name)

    def __hash__(self) -> int:
        return hash((self.job, self.direction, self.name))

    def __repr__(self) -> str:
        return f"<Port {self.direction}:{self.name} of job {self.job.id}>"

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, value: Any, *, transaction: Any = None) -> None:
        """Append one value and ask the reader to run: the job of an input port, the parent of an output port's job."""
        self.write_many([value], transaction=transaction)

    def write_many(self, values_: Iterable[Any], *, transaction: Any = None) -> None:
        """Append values, in order, in one transaction."""
        limit = self._runtime.settings.max_value_bytes
        context = current_context()
        scope = current_port_scope()
        options = None if scope.log else '{"log": false}'
        written = tuple((values.encode(value, limit=limit), context, options) for value in values_)
        if not written:
            return
        self._do(
            "write",
            Write(self.job.id, self.direction, self.name, written, notify=scope.notify, as_default=scope.set_default),
            transaction,
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, *, transaction: Any = None) -> Any:
        """Read the oldest value; without one the default, any number of times; NO_DATA without either.

        With `transaction=` the packet is consumed if that is committed, and is on the port again if not. Until then
        other clients read the packets behind it, and a run of a job that comes to it waits.
        """
        if transaction is not None:
            row, found = self._read_with(transaction)
            value = row.default_value if found is None else found.value
            return NO_DATA if value is None else values.decode(value)
        found = self._next(many=False)
        return self.default if found is None else values.decode(found.value)

    def read_packet(self, *, transaction: Any = None) -> Packet | None:
        """Read the oldest packet with its context, as `read` does; never the default."""
        found = self._next(many=False) if transaction is None else self._read_with(transaction)[1]
        return None if found is None else _packet(found)

    def __iter__(self) -> Iterator[Any]:
        """Read values until the port is empty; never the default."""
        while (found := self._next(many=True)) is not None:
            yield values.decode(found.value)

    def peek(self, limit: int = READ_AHEAD) -> list[Packet]:
        """Return the next packets without reading them."""
        check_number("limit", limit, of="packets")
        unit = active()
        if unit is not None:
            return [_packet(found) for found in unit.peek(self._key, self._id(), limit)]
        connections = self._runtime.connections
        rows = self._ask(lambda port_id: packets.read_ahead(connections, port_id, seen=(), limit=limit))
        return [_packet(Written.of_row(row)) for row in rows or ()]

    def __len__(self) -> int:
        """Return how many packets wait; a default does not count. Reads them all: for a million half a second."""
        unit = active()
        if unit is not None:
            return unit.count(self._key, self._id())
        return self._ask(lambda port_id: packets.count(self._runtime.connections, port_id)) or 0

    def __bool__(self) -> bool:
        """A port is true, also an empty one."""
        return True

    @property
    def has_data(self) -> bool:
        """Whether `read` would return a value: a packet waits, or there is a default."""
        return bool(self.peek(1)) or self.has_default

    # -- default and channels ------------------------------------------------------------------------------------

    @property
    def default(self) -> Any:
        """What an empty port reads as; NO_DATA without one. Changing it asks nobody to run."""
        text = self._read_row().default_value
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
        """Whether there is a default; null is one."""
        return self._read_row().default_value is not None

    @property
    def channels(self) -> list[str]:
        """The channels an input port subscribes to, or to which an output port's values are published."""
        return list(self._read_row().channels)

    @channels.setter
    def channels(self, names: Iterable[str]) -> None:
        if isinstance(names, str) or names is None:
            raise InvalidChannelError(f"channels takes a list of channel names, not {names!r}.")
        checked = tuple(dict.fromkeys(channels_of.check(name) for name in names))
        self._do("channels", SetChannels(self.job.id, self.direction, self.name, checked))

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> PortKey:
        return (self.job.id, self.direction, self.name)

    @property
    def _runtime(self) -> Any:
        return self.job._runtime

    def _do(self, name: str, change: Change, transaction: Any = None) -> None:
        submit(self._runtime, name, change, transaction)

    def _next(self, *, many: bool) -> Written | None:
        unit = active()
        if unit is not None:
            return unit.next_packet(self._key, self._id(), many=many)
        connections = self._runtime.connections
        row = self._ask(lambda port_id: connections.transact("read", lambda executor: packets.pop(executor, port_id)))
        return None if row is None else Written.of_row(row)

    def _read_with(self, transaction: Any) -> tuple[Any, Written | None]:
        """Return the port's row, and what is read from it in the caller's transaction."""
        if active() is not None:
            raise IllegalMoveError(
                f"{self.direction}put port {self.name!r} of job {self.job.id} is read with transaction= inside a run, "
                "which may have read ahead of it: read it inside of `with job.unit(transaction=...)`."
            )
        borrowed = self._runtime.connections.borrow(transaction)
        with borrowed.atomic():
            stored = {(row.direction, row.name): row for row in ports.of_jobs(borrowed, [self.job.id])}
            row = stored.get((self.direction, self.name)) or stored.get((self.direction, WILDCARD)) or self._find()
            found = packets.pop(borrowed, row.id) if row.id is not None and row.name != WILDCARD else None
        return row, None if found is None else Written.of_row(found)

    def _ask(self, ask: Callable[[int], T]) -> T | None:
        """Ask the store about the port; None for one that is not stored yet.

        One without packets may have been taken away since this handle found it, and perhaps made anew.
        """
        before = self._id()
        found = ask(before) if before is not None else None
        if not found:
            self._row = self._find()
            port_id = self._id()
            if port_id not in (None, before):
                return ask(port_id)
        return found

    def _rows(self, *, fresh: bool = False) -> dict[tuple[str, str], Any]:
        unit = active()
        if unit is not None:
            return unit.ports(self.job.id, fresh=fresh) or self.job._ports_made()
        stored = {(row.direction, row.name): row for row in ports.of_jobs(self._runtime.connections, [self.job.id])}
        return stored or self.job._ports_made()

    def _find(self) -> Any:
        rows = self._rows()
        row = rows.get((self.direction, self.name))
        if row is None and (self.direction, WILDCARD) not in rows:
            self.job._found(rows)
            known = ", ".join(sorted(name for direction, name in rows if direction == self.direction)) or "none"
            raise PortNotFoundError(
                f"Job {self.job.id} has no {self.direction}put port {self.name!r}; it has: {known}. Name it in the "
                f"task's or the job's {self.direction}ports=, or allow further ports with \"*\"."
            )
        return row if row is not None else rows[self.direction, WILDCARD]

    def _read_row(self) -> Any:
        rows = self._rows(fresh=True)
        row = rows.get((self.direction, self.name)) or rows.get((self.direction, WILDCARD))
        return row if row is not None else self._find()

    def _id(self) -> int | None:
        """Return the port's id, None for one that is not stored yet."""
        if self._row.id is None or self._row.name == WILDCARD:
            self._row = self._find()
        return self._row.id if self._row.name != WILDCARD else None


def _packet(found: Written) -> Packet:
    return Packet(
        values.decode(found.value),
        values.decode(found.context) if found.context else {},
        values.decode(found.options) if found.options else {},
        found.written_at,
    )

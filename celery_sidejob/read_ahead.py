"""What a run has read ahead of its ports: packets looked at or taken, and which of them its unit has read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .model.changes import PortKey
from .operations.hold import Hold
from .operations.runs import Unit
from .operations.runtime import Runtime
from .store import packets

READ_AHEAD = 100


@dataclass(frozen=True, slots=True)
class Written:
    """A packet as it was read: its JSON texts, and when it was written (None in the unit that wrote it)."""

    value: str
    context: str | None
    options: str | None
    written_at: Any = None

    @classmethod
    def of_row(cls, row: Any) -> Written:
        """Return a stored packet."""
        return cls(row.value, row.context, row.options, row.written_at)


@dataclass(slots=True)
class _Buffer:
    """Rows of a port, oldest first: those read ahead, and those that this unit has read."""

    ahead: deque[Any] = field(default_factory=deque)
    read: list[Any] = field(default_factory=list)

    @property
    def seen(self) -> list[int]:
        """The ids of the packets this unit has read."""
        return [row.id for row in self.read]


class ReadAhead:
    """The packets that a run has at hand, by port."""

    def __init__(self, runtime: Runtime, hold: Hold) -> None:
        self._connections = runtime.connections
        self._hold = hold
        self._buffers: dict[int, _Buffer] = {}

    def next(self, unit: Unit, key: PortKey, port_id: int, *, many: bool) -> Written | None:
        """Read the next stored packet of a port as part of a unit; None if there is none."""
        kept = self._fill(unit, key, port_id, many)
        if not kept.ahead:
            return None
        row = kept.ahead.popleft()
        kept.read.append(row)
        unit.read.append((port_id, row.id))
        return Written.of_row(row)

    def has(self, unit: Unit, key: PortKey, port_id: int) -> bool:
        """Tell whether `next` would find a packet."""
        return bool(self._fill(unit, key, port_id, many=False).ahead)

    def peek(self, key: PortKey, port_id: int, limit: int) -> list[Written]:
        """Return the next stored packets without reading them."""
        kept = self._buffers.get(port_id, _Buffer())
        rows = [*kept.ahead] if key[0] != self._hold.job_id else []
        if len(rows) < limit:
            rows += packets.read_ahead(
                self._connections, port_id, seen=kept.seen + [row.id for row in rows], limit=limit - len(rows)
            )
        return [Written.of_row(row) for row in rows]

    def count(self, key: PortKey, port_id: int) -> int:
        """Return how many stored packets wait on a port."""
        kept = self._buffers.get(port_id, _Buffer())
        taken = len(kept.ahead) if key[0] != self._hold.job_id else 0  # by this run, so no longer counted as free
        return taken + packets.count(self._connections, port_id, seen=kept.seen)

    def begin_next(self) -> None:
        """Forget what the unit has read: it is applied."""
        for kept in self._buffers.values():
            kept.read.clear()

    def unread(self, ids: set[int]) -> None:
        """Have these packets read again."""
        for kept in self._buffers.values():
            kept.ahead.extendleft(reversed([row for row in kept.read if row.id in ids]))
            kept.read = [row for row in kept.read if row.id not in ids]

    def _fill(self, unit: Unit, key: PortKey, port_id: int, many: bool) -> _Buffer:
        """Fill the buffer of a port if it is empty.

        A job's own input ports are only looked at: nobody else reads them for good without taking. Packets of other
        ports are taken for this run, exactly as many as will be read.
        """
        kept = self._buffers.setdefault(port_id, _Buffer())
        if kept.ahead:
            return kept
        hold = self._hold
        rows: Sequence[Any]
        if key[0] == hold.job_id and key[1] == "in":
            rows = packets.read_ahead(self._connections, port_id, seen=kept.seen, limit=READ_AHEAD)
        else:

            def take(executor: Any) -> list[Any]:
                return packets.take(
                    executor, port_id, job_id=hold.job_id, run_no=hold.run_no, limit=READ_AHEAD if many else 1
                )

            rows = self._connections.transact("take", take)
            unit.took = unit.took or bool(rows)
        kept.ahead.extend(rows)
        return kept

"""What a run has read ahead of its ports: packets looked at or taken, and which of them its unit has read."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..model.changes import PortKey
from ..operations.hold import Hold
from ..operations.runs import Unit
from ..operations.runtime import Runtime
from ..store import packets

READ_AHEAD = 100

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
"""Between two looks at packets that another transaction is reading."""


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

    def peek(self, port_id: int, limit: int) -> list[Written]:
        """Return the next stored packets without reading them."""
        hold, kept = self._hold, self._buffers.get(port_id, _Buffer())
        rows = packets.read_ahead(
            self._connections, port_id, seen=kept.seen, limit=limit, job_id=hold.job_id, run_no=hold.run_no
        )
        return [Written.of_row(row) for row in rows]

    def count(self, port_id: int) -> int:
        """Return how many stored packets wait on a port."""
        hold, kept = self._hold, self._buffers.get(port_id, _Buffer())
        return packets.count(self._connections, port_id, seen=kept.seen, job_id=hold.job_id, run_no=hold.run_no)

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

        A job's own input ports are only looked at, as it is their reader; if somebody else was quicker, the commit is
        refused, and the next run takes. Packets of other ports are taken for this run, exactly as many as will be read.
        """
        kept = self._buffers.setdefault(port_id, _Buffer())
        if not kept.ahead:
            own = key[:2] == (self._hold.job_id, "in")
            if own and not self._hold.row.takes:
                kept.ahead.extend(packets.read_ahead(self._connections, port_id, seen=kept.seen, limit=READ_AHEAD))
            else:
                kept.ahead.extend(self._take(port_id, kept, READ_AHEAD if many or own else 1))
                unit.took = unit.took or bool(kept.ahead)
        return kept

    def _take(self, port_id: int, kept: _Buffer, most: int) -> list[Any]:
        """Take packets for this run; none if there are none.

        Those that a transaction in progress reads are waited for. It may be rolled back, and nobody would ask the job
        to run for packets that it has passed over.
        """
        hold, pause_s = self._hold, FIRST_PAUSE_S

        def take(executor: Any) -> list[Any]:
            return packets.take(executor, port_id, job_id=hold.job_id, run_no=hold.run_no, limit=most)

        while not (rows := self._connections.transact("take", take)):
            if not packets.read_ahead(self._connections, port_id, seen=kept.seen, limit=1):
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return rows

"""What a run has read before its body asks: packets, looked at or taken ahead of its ports, and the stored children."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model.changes import PortKey
from ..operations.hold import Hold
from ..operations.runs.runs import Unit
from ..operations.runtime import Runtime
from ..store import jobs, packets, room
from ..store.errors import Moved
from ..store.statement import Transaction
from . import view

READ_AHEAD = 100

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
"""Between two looks at packets that another transaction is reading."""


@dataclass(slots=True)
class _Buffer:
    """Rows of a port, oldest first: those read ahead, and those that this unit has read."""

    ahead: deque[Any] = field(default_factory=deque)
    read: list[Any] = field(default_factory=list)
    empty: Any = None
    """The port's row, if this unit has found it without packets."""
    in_doubt: bool = False
    """Whether packets may have been taken without an answer: the body has gone on after the error."""

    @property
    def seen(self) -> list[int]:
        """The ids of the packets this unit has read."""
        return [row.id for row in self.read]


class ReadAhead:
    """The packets that a run has at hand, by port."""

    def __init__(self, runtime: Runtime, hold: Hold) -> None:
        self._connections = runtime.connections
        self._hold = hold
        self._buffers: dict[PortKey, _Buffer] = {}
        self.some_configured = False
        """Whether this unit has configured ports: packets at hand may be of one that it takes away."""

    def next(self, unit: Unit, key: PortKey, *, many: bool) -> Any | None:
        """Read the next stored packet of a port as part of a unit, and return its row; None if there is none.

        `many`: more will be read.
        """
        kept = self._fill(unit, key, self._page(key) if many else 1)
        if not kept.ahead:
            return None
        row = kept.ahead.popleft()
        kept.read.append(row)
        unit.read.append((row.port_id, row.id))
        return row

    def drain(self, unit: Unit, key: PortKey, most: int | None = None) -> list[Any]:
        """Read all stored packets of a port as part of a unit, or `most`: those at hand, then those behind them."""
        found: list[Any] = []
        for _ in range(2 if self._at_hand(key).ahead else 1):
            left = None if most is None else most - len(found)
            if left == 0:
                break
            kept = self._fill(unit, key, left)
            rows = [kept.ahead.popleft() for _ in range(min(len(kept.ahead), left or len(kept.ahead)))]
            found += rows
            unit.read += [(row.port_id, row.id) for row in rows]
            kept.read += rows
        return found

    def has(self, unit: Unit, key: PortKey) -> bool:
        """Tell whether `next` would find a packet."""
        return bool(self._fill(unit, key).ahead)

    def head(self, key: PortKey) -> int | None:
        """Return the id of the next packet at hand."""
        ahead = self._at_hand(key).ahead
        return int(ahead[0].id) if ahead else None

    def empty(self, key: PortKey) -> Any | None:
        """Return the stored port, with its default and channels, if this unit has found it without packets."""
        return self._at_hand(key).empty

    def peek(self, key: PortKey, limit: int) -> list[Any]:
        """Return the next stored packets without reading them."""
        hold, seen = self._hold, self._at_hand(key).seen
        return packets.peek(self._connections, key, seen=seen, limit=limit, job_id=hold.job_id, run_no=hold.run_no)

    def count(self, key: PortKey) -> int:
        """Return how many stored packets wait on a port."""
        hold, seen = self._hold, self._at_hand(key).seen
        return packets.count(self._connections, key, seen=seen, job_id=hold.job_id, run_no=hold.run_no)

    def begin_next(self, still: Sequence[tuple[int, int]]) -> None:
        """Forget what the unit has read, because it is applied, but for packets that the next has read already."""
        self.some_configured = False
        ids = {packet for _, packet in still}
        for kept in self._buffers.values():
            kept.read = [row for row in kept.read if row.id in ids]
            kept.empty = None

    def unread(self, ids: set[int]) -> None:
        """Have these packets read again."""
        for kept in self._buffers.values():
            kept.ahead.extendleft(reversed([row for row in kept.read if row.id in ids]))
            kept.read = [row for row in kept.read if row.id not in ids]

    def _at_hand(self, key: PortKey) -> _Buffer:
        """Return the buffer of a port. Without one it is empty and not kept: other threads may go through them all."""
        return self._buffers.get(key) or _Buffer()

    def _page(self, key: PortKey) -> int:
        """Return how many packets are read ahead: as many as the unit has read, for each look passes over those."""
        return max(READ_AHEAD, len(self._at_hand(key).read))

    def _fill(self, unit: Unit, key: PortKey, most: int | None = 1) -> _Buffer:
        """Fill the buffer of a port if it is empty, with `most` packets (None: all) or a few more.

        A job's own input ports are only looked at, as it is their reader; if somebody else was quicker, the commit is
        refused, and the next run takes. Packets of other ports are taken for this run, exactly as many as will be read.
        """
        kept = self._buffers.setdefault(key, _Buffer())
        if (self.some_configured or not kept.ahead) and not view.keeps_stored(unit.changes, key):
            return _Buffer()
        if not kept.ahead:
            own = key[:2] == (self._hold.job_id, "in")
            takes = not own or self._hold.row.takes
            if own and most is not None:
                most = max(most, self._page(key))
            if not takes:
                rows: Sequence[Any] = packets.read_ahead(self._connections, key, seen=kept.seen, limit=most)
            else:
                rows = self._take(unit, key, kept, most)
            kept.ahead.extend(row for row in rows if row.id is not None)
            if not kept.ahead:
                kept.empty = rows[0] if rows else None
            elif takes:
                unit.took = True
        return kept

    def _take(self, unit: Unit, key: PortKey, kept: _Buffer, most: int | None) -> Sequence[Any]:
        """Take packets for this run, and return what `read_ahead` returns.

        Those that a transaction in progress reads are waited for. It may be rolled back, and nobody would ask the job
        to run for packets that it has passed over.
        """
        hold, pause_s = self._hold, FIRST_PAUSE_S

        @behind_marks
        def take(executor: Any) -> Sequence[Any]:
            return packets.take(
                executor, key, job_id=hold.job_id, run_no=hold.run_no, limit=most, again=kept.in_doubt, seen=kept.seen
            )

        while not (rows := self._taken(unit, kept, take)):
            rows = packets.read_ahead(self._connections, key, seen=kept.seen, limit=1)
            if not rows or rows[0].id is None:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return rows

    def _taken(self, unit: Unit, kept: _Buffer, take: Callable[[Any], Sequence[Any]]) -> Sequence[Any]:
        try:
            rows = self._connections.transact("take", take)
        except BaseException:  # a time limit, too: what may have been taken is freed at the latest when the run ends
            kept.in_doubt = unit.took = True
            raise
        kept.in_doubt = False
        return rows


def behind_marks(read: Callable[[Transaction], Sequence[Any]]) -> Callable[[Transaction], Sequence[Any]]:
    """Make a read that passes over packets which a run is just marking wait for that run, to keep their order.

    It raises Moved, so that the transaction is repeated, and then first waits for the port's lock. Packets that it
    passes over then belong to another reader.
    """
    behind: set[int] = set()

    def in_order(executor: Transaction) -> Sequence[Any]:
        if behind:
            room.lock(executor, behind)
        rows = read(executor)
        passed = {row.port_id for row in rows if row.passed_over} - behind
        if passed:
            behind.update(passed)
            raise Moved("packets were marked while they were read")
        return rows

    return in_order


class Children:
    """The same children until the run's first commit, then those that the store has.

    A body that sees a child's end sees all ends that need no further run, and no other. Very many children are read
    when the body first asks for them all: it misses no end, and may see one for which a further run is owed. A
    shutdown reads them as they are.
    """

    def __init__(self, runtime: Runtime, hold: Hold) -> None:
        self._runtime = runtime
        self._hold = hold
        self._rows: Sequence[Any] | None = hold.children
        self._are_first = hold.kind == "run"

    def begin_next(self) -> None:
        """Read them anew from now on: a unit was committed."""
        self._rows, self._are_first = None, False

    def all(self) -> Sequence[Any]:
        """Return their rows, oldest first."""
        if self._rows is not None:
            return self._rows
        found = jobs.children(self._runtime.connections, self._hold.job_id)
        if self._are_first:
            self._rows = found
        return found

    def find(self, parent_id: int, name: str) -> tuple[int, Any] | None:
        """Return the id of a child of this job or another, and its row if that was read already; None without one."""
        if parent_id == self._hold.job_id and self._rows is not None:
            return next(((row.id, row) for row in self._rows if row.name == name), None)
        child_id = jobs.child(self._runtime.connections, parent_id, name)
        return None if child_id is None else (child_id, None)

"""Waiting for room on ports that have a limit, and the room that a client makes by reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..model.changes import PortKey
from ..model.errors import FullPort
from ..model.port import facing_ports, value_of
from ..store import asks, packets, room
from ..store.statement import Transaction
from .after_commit import AfterCommit
from .hold import Hold
from .lending import follow_commit_of
from .noted_asks import apply_noted_asks
from .runtime import Runtime


def wait_for_room(executor: Transaction, hold: Hold, full: Sequence[FullPort]) -> bool:
    """Have the run that ends in this transaction wait for room on ports; False if all of them have room by now.

    Whoever makes room asks the job. Raises PortFullError if the job would wait for itself: it is the only reader of a
    port for whose room somebody waits for whom it waits.

    A port that is gone has room too, for the run must learn that.
    """
    limits = room.lock(executor, [port.id for port in full])
    room.mark(executor, limits)
    used = room.used(executor, limits)
    needs = {
        port.id: port.needs
        for port in full
        if (limit := limits.get(port.id)) is not None and used[port.id] + port.needs > limit
    }
    if not needs:
        return False
    room.wait(executor, hold.job_id, run_no=hold.run_no, needs=needs)
    other = room.circle(executor, hold.job_id, run_no=hold.run_no)
    if other is not None:
        raise facing_ports([port for port in full if port.id in needs], hold.job_id, other)
    return True


def read_packets(runtime: Runtime, key: PortKey, *, limit: int) -> tuple[Sequence[Any], list[Any]]:
    """Read and remove the oldest packets of a port for a client, and ask who waits for their room.

    Returns their rows and their values. For an empty port that is one row without a packet, and no value; no row means
    that there is no such port. Raises InvalidValueError, and removes nothing, if one of them cannot be decoded.
    """

    def work(executor: Transaction) -> tuple[Sequence[Any], list[Any], AfterCommit]:
        return _pop(executor, key, limit)

    popped, values, after_commit = runtime.connections.transact("read", work)
    apply_noted_asks(runtime, after_commit.noted)
    return popped, values


def read_packets_with(
    runtime: Runtime, key: PortKey, transaction: Any, *, limit: int
) -> tuple[Sequence[Any], list[Any], Transaction]:
    """Do the same in the caller's transaction; return also what runs statements in it."""
    borrowed = runtime.connections.borrow(transaction)
    with borrowed.atomic():
        popped, values, after_commit = _pop(borrowed, key, limit)
    follow_commit_of(runtime, borrowed, after_commit)
    return popped, values, borrowed


def _pop(executor: Transaction, key: PortKey, limit: int) -> tuple[Sequence[Any], list[Any], AfterCommit]:
    after_commit = AfterCommit()
    popped = packets.pop(executor, key, limit=limit)
    values = [value_of(row, key) for row in popped if row.id is not None]  # before the commit: else they would be lost
    limited = room.limited(popped)
    if limited:
        room.lock(executor, limited)
        waiting = room.freed(executor, limited)
        if waiting:
            asks.note(executor, waiting, "run")
            after_commit.noted += waiting
    return popped, values, after_commit

"""Waiting for room on ports with a limit, and the room that a client makes by reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...model.changes import PortKey
from ...model.errors import FullPort
from ...model.port import facing_ports, value_of
from ...store import packets, room
from ...store.errors import Moved
from ...store.statement import Reader, Transaction
from ..after_commit import AfterCommit
from ..changes.follow_up import apply_noted_asks, follow_commit_of
from ..changes.mailboxes import make_room
from ..hold import Hold
from ..runtime import Runtime


def wait_for_room(executor: Transaction, hold: Hold, full: Sequence[FullPort], after_commit: AfterCommit) -> bool:
    """Make the run that ends in this transaction wait for room on ports; False if all have room by now.

    A reader that makes room asks the job to run. Raises PortFullError if the job would wait for itself: another job
    waits for room on a port that only this job reads, and this job waits for that other job.

    A deleted port counts as having room, because the run must learn of the deletion.
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
    if hold.row.waited_for_room:
        make_room(executor, needs.keys(), after_commit)  # some room was kept for this job, which now needs more
    return True


def pass_on(runtime: Runtime, job_id: int) -> None:
    """Give the room that was kept for a job to other waiting jobs: its run is over, or it was woken long ago.

    The end of a run calls this after its commit. If the process dies before, the sweeper does this (`kept_too_long`).
    """

    def work(executor: Transaction) -> AfterCommit:
        after_commit = AfterCommit()
        make_room(executor, room.waited_for(executor, job_id), after_commit)
        return after_commit

    apply_noted_asks(runtime, runtime.connections.transact("pass-on", work).noted)


def read_packets(
    runtime: Runtime, key: PortKey, transaction: Any = None, *, limit: int
) -> tuple[Sequence[Any], list[Any], Reader]:
    """Read and remove the oldest packets of a port for a client, and ask the jobs that wait for their room.

    Returns their rows, their values, and where to ask about the port: in the caller's transaction, if that is given.
    For an empty port these are one row without a packet, and no value; no row means that there is no such port. Raises
    InvalidValueError, and removes nothing, if a value cannot be decoded.
    """
    in_order = behind_marks(lambda executor: packets.pop(executor, key, limit=limit))

    def read(executor: Transaction) -> tuple[Sequence[Any], list[Any], AfterCommit]:
        after_commit = AfterCommit()
        popped = in_order(executor)
        values = [value_of(row, key) for row in popped if row.id is not None]  # before the commit, which removes them
        make_room(executor, room.limited(popped), after_commit)
        return popped, values, after_commit

    if transaction is None:
        popped, values, after_commit = runtime.connections.transact("take", read)
        apply_noted_asks(runtime, after_commit.noted)
        return popped, values, runtime.connections
    borrowed = runtime.connections.borrow(transaction)
    popped, values, after_commit = borrowed.apply(lambda: read(borrowed))
    follow_commit_of(runtime, borrowed, after_commit)
    return popped, values, borrowed


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

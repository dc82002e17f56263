"""Deleting jobs. Asking and terminating are changes like any other (`unit_of_work`).

A job is only deleted with everything below it. A tree too large for one transaction is deleted in parts, from the
bottom up. A part is not deleted while one of its jobs is not at rest, or has a child outside the part.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Any

from ...model.errors import job_not_found
from ...model.events import JobDeleted
from ...model.logger import logger
from ...model.status import Status
from ...store import deletions, jobs, trees
from ...store.errors import FAILURES, Moved, RowsLocked
from ...store.outbox import doorbells
from ...store.statement import Reader, Transaction
from ..after_commit import tell
from ..lock_set import TOGETHER
from ..runtime import Runtime

PRUNED_TOGETHER = 5000
"""The most jobs that the pruner deletes in one transaction, which takes half a second."""
PART = 500
"""How many jobs of a larger tree one transaction deletes."""


def is_being_deleted(executor: Transaction, job_id: int) -> bool:
    """Tell whether a locked, terminated job is part of a tree whose deletion has begun.

    No deletion above it begins before the end of this transaction: a deletion first locks its root exclusively, and
    then reads the statuses below.
    """
    line = trees.ancestors(executor, job_id)
    if len(line) > 1:
        jobs.keep(executor, line[1:], waits=True)
        if trees.ancestors(executor, job_id) != line:
            raise Moved(f"the ancestors of job {job_id} changed while they were being locked")
    return bool(deletions.trees_among(executor, line))


def delete(runtime: Runtime, job_id: int) -> bool:
    """Delete a job and everything below it if all are terminated; otherwise change nothing and return False.

    Terminated jobs are in no run and have no message, so no live run is deleted. Later deliveries and zombies find no
    row.

    Up to `TOGETHER` jobs are deleted in one transaction. The deletion of a larger tree is recorded in a transaction,
    and is final from then on: none of its jobs can be forced to run or be disowned. It continues in parts; if this
    process dies, the sweeper continues it.
    """

    def work(executor: Transaction) -> Sequence[JobDeleted] | bool:
        before = {row.id for row in trees.subtree(executor, [job_id], most=TOGETHER + 1)}
        if len(before) > TOGETHER:
            return _begin(executor, job_id)
        if not before:
            raise job_not_found(job_id)
        locked = jobs.lock_exclusively(executor, before)
        if {row.id for row in trees.subtree(executor, [job_id])} != before or locked.keys() != before:
            raise Moved("children came or went before the subtree was locked")
        if any(row.status != Status.TERMINATED for row in locked.values()) or doorbells.pending(executor, before):
            return False
        return _deleted(locked.values(), deletions.delete(executor, before))

    deleted = runtime.connections.transact("delete", work)
    if deleted is True:
        _delete_parts(runtime, job_id)
    elif deleted:
        tell(runtime, *deleted)
    return deleted is not False


def _delete_parts(runtime: Runtime, job_id: int) -> None:
    """Delete a large tree whose deletion has begun; after an error the sweeper does it."""
    tree = TerminatedTree(runtime, job_id)
    try:
        while tree.read() and any(list(tree.parts(waits=True))):  # read again if the sweeper had a part in it
            pass
    except FAILURES as error:
        logger.warning("The sweeper goes on deleting job %d and everything below it: %s", job_id, error)


def _begin(executor: Transaction, job_id: int) -> bool:
    """Record the deletion of a large tree, if all its jobs are terminated; from now on its root accepts no run.

    A job below it that is about to be forced to run holds a lock on the root (`is_being_deleted`), so this waits for
    it.
    """
    if not jobs.lock_exclusively(executor, [job_id]):
        raise Moved("the job was deleted before it was locked")
    if not trees.rest(executor, job_id, Status.TERMINATED) or trees.due(executor, job_id):
        return False
    deletions.begin_tree(executor, job_id)
    return True


Expired = Callable[[Reader, Sequence[int]], set[int]]
"""Returns the failed jobs whose entry in the dead set has been kept long enough."""


def delete_finished(
    runtime: Runtime,
    job_ids: Sequence[int],
    statuses: Set[str],
    *,
    most: int | None = None,
    expired: Expired | None = None,
) -> int | None:
    """Delete jobs that rest in `statuses`, with all jobs below them, in one transaction; returns their number.

    A failed job is deleted too if it is `expired`.

    A job stays if work is still due for it or below it, if a part of its tree is locked at this moment, or if its tree
    changes meanwhile. A result that the backend does not have yet is still due: a chord or an errback may wait for it.
    Returns None, and changes nothing, if the trees have more than `most` jobs. Raises RowsLocked, and changes nothing,
    if another transaction has locked a row of one of the jobs, but not the job itself.
    """

    def work(executor: Transaction) -> tuple[int, Sequence[JobDeleted]] | None:
        found = _trees(executor, job_ids)
        everything = [job_id for tree in found.values() for job_id in tree]
        if most is not None and len(everything) > most:
            return None
        locked = jobs.lock_exclusively(executor, everything, waits=False)
        kept = {job_id for job_id in everything if job_id not in locked or locked[job_id].status not in statuses}
        kept -= _expired(executor, locked, kept, expired)
        kept |= deletions.unsettled(executor, everything)
        now = _trees(executor, job_ids)
        gone = [root for root, tree in found.items() if now.get(root) == tree and not tree & kept]
        ids = [job_id for root in gone for job_id in found[root]]
        jobs.wait_no_longer(executor)
        return len(gone), _deleted([locked[job_id] for job_id in ids], deletions.delete(executor, ids))

    if not job_ids:
        return 0
    done = runtime.connections.transact("delete", work)
    if done is None:
        return None
    tell(runtime, *done[1])
    return done[0]


def delete_finished_tree(runtime: Runtime, job_id: int, statuses: Set[str]) -> bool:
    """Delete a job with all below it, as `delete_finished` does; a tree of more than `TOGETHER` jobs in parts.

    False if the job, or the rest of its tree, stays. The job also stays if this process dies between two parts.
    """
    try:
        gone = delete_finished(runtime, [job_id], statuses, most=TOGETHER)
    except RowsLocked:
        return False
    if gone is not None:
        return gone == 1
    tree = LargeTree(runtime, job_id, statuses)
    if tree.read():
        for _ in tree.parts():
            pass
    return not jobs.find(runtime.connections, [job_id])


def _expired(executor: Reader, locked: dict[int, Any], kept: Set[int], expired: Expired | None) -> Set[int]:
    """Return the failed jobs that need not be kept."""
    failed = [job_id for job_id in kept if job_id in locked and locked[job_id].status == Status.FAILED]
    return expired(executor, failed) if failed and expired is not None else set()


def _deleted(rows: Iterable[Any], tracked: Set[int]) -> Sequence[JobDeleted]:
    """Return the events of deleted jobs: those of children, which have the higher ids, before those of parents."""
    return [JobDeleted(row.id, row.task, row.id in tracked) for row in sorted(rows, key=attrgetter("id"), reverse=True)]


def _trees(executor: Transaction, job_ids: Collection[int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for row in trees.subtree(executor, job_ids):
        found[row.root].add(row.id)
    return found


class LargeTree:
    """A tree that is deleted in parts, from the bottom up, if all its jobs rest in `statuses`.

    A failed job is deleted too if it is `expired`. The root is deleted last. While a run of the root is owed, or the
    root is locked, nothing more is deleted.
    """

    def __init__(self, runtime: Runtime, root: int, statuses: Set[str], expired: Expired | None = None) -> None:
        self._runtime = runtime
        self._root = root
        self._statuses = statuses
        self._expired = expired
        self._left = array("q")  # each job after all its ancestors

    def read(self) -> bool:
        """Read the jobs of the tree; False if any of them is not finished."""
        connections, statuses = self._runtime.connections, self._statuses
        if self._expired is not None:
            failed = trees.failed(connections, self._root)
            if failed and self._expired(connections, failed) != set(failed):
                return False
            statuses = statuses | {Status.FAILED}
        found = trees.levels(connections, self._root, statuses)
        if found is not None:
            self._left = array("q", found)
        return found is not None

    def parts(self, *, waits: bool = False) -> Iterator[int]:
        """Delete part after part, and yield the number of jobs of each, until no job can or need be deleted.

        With `waits`, wait for locked jobs and for their locked rows.
        """
        while deleted := self._delete_part(waits=waits):
            yield deleted

    def _delete_part(self, *, waits: bool) -> int:
        part = self._left[-PART:].tolist()

        def work(executor: Transaction) -> Sequence[JobDeleted] | None:
            wanted = {self._root, *part}
            locked = jobs.lock_exclusively(executor, wanted, waits=waits)
            kept = {row.id for row in locked.values() if row.status not in self._statuses}
            if locked.keys() != wanted or kept - _expired(executor, locked, kept, self._expired):
                return None
            if {row.id for row in trees.subtree(executor, part)} != set(part) or self._are_due(executor, part):
                return None
            if not waits:
                jobs.wait_no_longer(executor)
            return _deleted([locked[job_id] for job_id in part], deletions.delete(executor, part))

        try:
            deleted = self._runtime.connections.transact("delete", work) if part else None
        except RowsLocked:
            if waits:
                raise
            deleted = None
        if deleted is None:
            return 0
        tell(self._runtime, *deleted)
        del self._left[-PART:]
        return len(part)

    def _are_due(self, executor: Transaction, part: list[int]) -> bool:
        return bool(deletions.unsettled(executor, {self._root, *part}))


class TerminatedTree(LargeTree):
    """A large tree whose deletion is recorded: a job in it that is not terminated came from a caller's own transaction.

    Then the other jobs stay until that job is terminated too, and the deletion continues.
    """

    def __init__(self, runtime: Runtime, root: int) -> None:
        super().__init__(runtime, root, frozenset({Status.TERMINATED}))

    def _are_due(self, executor: Transaction, part: list[int]) -> bool:
        return doorbells.pending(executor, part)

"""Deleting jobs. Asking and terminating are changes like any other (`unit_of_work`).

A job is only deleted with everything below it. A tree too large for one transaction is deleted in parts, from the
bottom up.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence, Set
from operator import attrgetter
from typing import Any

from ..model.errors import JobNotFoundError
from ..model.events import JobDeleted
from ..model.status import Status
from ..store import jobs, trees
from ..store.errors import Moved
from ..store.outbox import doorbells
from ..store.statement import Transaction
from .after_commit import tell
from .runtime import Runtime

TOGETHER = 5000
"""Jobs that the pruner deletes in one transaction, at most: deleting this many takes half a second."""
PART = 500
"""Jobs of a larger tree that one transaction deletes."""


def delete(runtime: Runtime, job_id: int) -> bool:
    """Delete a job and everything below it if all are terminated; otherwise change nothing and return False.

    Terminated jobs are in no run and have no message, so no live run is deleted. Later deliveries and zombies find no
    row.
    """

    def work(executor: Transaction) -> Sequence[JobDeleted] | None:
        before = {row.id for row in trees.subtree(executor, [job_id])}
        if not before:
            raise JobNotFoundError(f"There is no job {job_id}: it was deleted, or never committed.")
        locked = jobs.lock_exclusively(executor, before)
        if {row.id for row in trees.subtree(executor, [job_id])} != before or locked.keys() != before:
            raise Moved("children came or went before the subtree was locked")
        if any(row.status != Status.TERMINATED for row in locked.values()) or doorbells.pending(executor, before):
            return None
        jobs.delete(executor, before)
        return _deleted(locked.values())

    deleted = runtime.connections.transact("delete", work)
    tell(runtime, *deleted or ())
    return deleted is not None


def delete_finished(
    runtime: Runtime, job_ids: Sequence[int], statuses: Set[str], *, most: int | None = None
) -> int | None:
    """Delete those of the jobs that rest in `statuses`, with all below them, in one transaction; returns their number.

    A job stays if anything is still due for it or below it, if a part of its tree is locked just now, or if that
    changes meanwhile. A result that the backend does not have yet is still due: a chord or an errback may wait for it.
    Returns None, and changes nothing, if the trees have more than `most` jobs.
    """

    def work(executor: Transaction) -> tuple[int, Sequence[JobDeleted]] | None:
        found = _trees(executor, job_ids)
        everything = [job_id for tree in found.values() for job_id in tree]
        if most is not None and len(everything) > most:
            return None
        locked = jobs.lock_free_exclusively(executor, everything)
        kept = {job_id for job_id in everything if job_id not in locked or locked[job_id].status not in statuses}
        kept |= jobs.unsettled(executor, everything)
        now = _trees(executor, job_ids)
        gone = [root for root, tree in found.items() if now.get(root) == tree and not tree & kept]
        jobs.delete(executor, [job_id for root in gone for job_id in found[root]])
        return len(gone), _deleted(locked[job_id] for root in gone for job_id in found[root])

    if not job_ids:
        return 0
    done = runtime.connections.transact("delete", work)
    if done is None:
        return None
    tell(runtime, *done[1])
    return done[0]


def _deleted(rows: Iterable[Any]) -> Sequence[JobDeleted]:
    """Return the events of deleted jobs: those of children, which have the higher ids, before those of parents."""
    return [JobDeleted(row.id, row.task) for row in sorted(rows, key=attrgetter("id"), reverse=True)]


def _trees(executor: Transaction, job_ids: Collection[int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for row in trees.subtree(executor, job_ids):
        found[row.root].add(row.id)
    return found


class LargeTree:
    """A tree that is deleted in parts, from the bottom up; deletion begins only if all of it rests in `statuses`.

    Its root goes last. While a run of the root is asked for, or the root is locked, nothing more is deleted.
    """

    def __init__(self, runtime: Runtime, root: int, statuses: Set[str]) -> None:
        self._runtime = runtime
        self._root = root
        self._statuses = statuses
        self._left = array("q")  # each job after all its ancestors

    def read(self) -> bool:
        """Read the jobs of the tree; False if one of them is not finished."""
        found = trees.levels(self._runtime.connections, self._root, self._statuses)
        if found is not None:
            self._left = array("q", found)
        return found is not None

    def delete_part(self) -> bool:
        """Delete the next part; False if nothing more can or need be deleted."""
        part = self._left[-PART:].tolist()

        def work(executor: Transaction) -> Sequence[JobDeleted] | None:
            locked = jobs.lock_free_exclusively(executor, {self._root, *part})
            if not self._are_free(executor, locked, part):
                return None
            jobs.delete(executor, part)
            return _deleted(locked[job_id] for job_id in part)

        deleted = self._runtime.connections.transact("delete", work) if part else None
        if deleted is None:
            return False
        tell(self._runtime, *deleted)
        del self._left[-PART:]
        return bool(self._left)

    def _are_free(self, executor: Transaction, locked: dict[int, Any], part: list[int]) -> bool:
        if locked.keys() != {self._root, *part} or any(row.status not in self._statuses for row in locked.values()):
            return False
        below = {row.id for row in trees.subtree(executor, part)}
        return below == set(part) and not jobs.unsettled(executor, {self._root, *part})

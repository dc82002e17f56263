"""Whether a job is part of a large tree that is being deleted."""

from __future__ import annotations

from ..store import jobs, tree_deletions, trees
from ..store.errors import Moved
from ..store.statement import Transaction


def is_being_deleted(executor: Transaction, job_id: int) -> bool:
    """Tell whether a locked, terminated job is part of a tree whose deletion has begun.

    No deletion above it begins before the end of this transaction: it would lock its root exclusively first, and look
    at the statuses below it then.
    """
    line = trees.ancestors(executor, job_id)
    if len(line) > 1:
        jobs.keep_when_free(executor, line[1:])
        if trees.ancestors(executor, job_id) != line:
            raise Moved(f"the ancestors of job {job_id} changed while they were being locked")
    return bool(tree_deletions.among(executor, line))

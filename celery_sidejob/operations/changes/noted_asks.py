"""Asks that were only noted as due timers: by a borrowed transaction, by a timer, or for a job that was not locked."""

from __future__ import annotations

from collections.abc import Iterable

from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...store import asks, jobs
from ...store.errors import FAILURES
from ...store.statement import Transaction
from ..after_commit import AfterCommit, follow
from ..lock_set import LockSet
from ..runtime import LocalRuntime, Runtime
from .dependencies import look
from .tree_terminations import terminate_pages
from .wakes import Wakes


def apply_noted_asks(runtime: Runtime, job_ids: Iterable[int], trees: Iterable[int] = ()) -> None:
    """Judge and apply the due timers of jobs, each job in its own transaction; then terminate pages of the `trees`.

    The transaction that noted them is committed, so no error here may make its call fail. The sweeper handles a locked
    job, or an ask that the store does not accept now.
    """
    terminate_pages(runtime, {*trees, *_apply(runtime, job_ids, leaves=FAILURES)})


def apply_due(runtime: Runtime, limit: int) -> None:
    """Do now, for up to `limit` jobs, the work that the sweeper would do in its next turns."""
    found = asks.due(runtime.connections, limit)
    look(runtime, [row.job_id for row in found if row.depends])
    apply_noted_asks(runtime, [row.job_id for row in found])


def apply_due_timers(runtime: Runtime, job_id: int) -> None:
    """Apply a job's due timers for the sweeper, which must learn of an error: it then sets the job aside.

    Only while the store is unavailable do the timers wait for a later turn.
    """
    _apply(runtime, [job_id], leaves=(StoreUnavailableError,))


def _apply(runtime: Runtime, job_ids: Iterable[int], *, leaves: tuple[type[Exception], ...]) -> set[int]:
    """Apply the due timers of jobs, and return the roots of trees whose termination has begun."""
    waiting, trees = sorted(set(job_ids), reverse=True), set[int]()
    while waiting:
        job_id = waiting.pop()

        def work(executor: Transaction, job_id: int = job_id) -> AfterCommit:
            return mature(runtime, executor, job_id)

        try:
            after_commit = runtime.connections.transact("mature", work)
        except leaves as error:
            logger.warning(
                "The ask of job %d is noted, and the sweeper applies it: %s",
                job_id,
                error,
                exc_info=not isinstance(error, StoreUnavailableError),
            )
            break
        follow(runtime, after_commit)
        waiting += after_commit.noted
        look(runtime, after_commit.looks)
        trees |= after_commit.trees
    return trees


def mature(runtime: LocalRuntime, executor: Transaction, job_id: int) -> AfterCommit:
    """Apply a job's due timers, unless its row is locked."""
    after_commit = AfterCommit()
    row = jobs.lock_if_free(executor, job_id)
    if row is None:
        return after_commit
    Wakes(runtime, executor, LockSet.of_rows(executor, {row.id: row}), after_commit).apply_due(job_id)
    return after_commit

"""Writing into the caller's transaction, and the work after its commit, which may never be reported to us."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...model.errors import StoreUnavailableError
from ...model.events import JobMoved
from ...model.logger import logger
from ...model.messages import Doorbell
from ...store.borrowed.borrowed import Borrowed
from ...store.outbox import doorbells
from ..after_commit import AfterCommit, announce, dispatch
from ..gates import capacity
from ..runtime import Runtime
from .dependencies import look
from .noted_asks import apply_noted_asks
from .publications import deliver


def follow_commit_of(runtime: Runtime, borrowed: Borrowed, after_commit: AfterCommit) -> Callable[[], None]:
    """Do the follow-up work when the caller's transaction commits; never after its rollback.

    Returns a function that does the work, for a caller that learns of the commit in another way.

    The rows are read again then: a savepoint inside the transaction may have been rolled back.
    """
    jobs = [doorbell.job_id for doorbell in after_commit.doorbells]
    noted = sorted(set(after_commit.noted))

    def committed() -> None:
        unpublished = not runtime.connections.is_broker
        rows = doorbells.waiting(runtime.connections, jobs, unpublished=unpublished) if jobs else ()
        there = {row.job_id for row in rows}
        for event in after_commit.events:
            if isinstance(event, JobMoved) and event.job_id in there:
                runtime.observer.tell(event)
        announce(runtime, after_commit)
        dispatch(runtime, map(Doorbell.of_row, rows), armed_now=True)
        for job_id in noted:
            apply_noted_asks(runtime, [job_id])
        look(runtime, after_commit.looks)
        deliver(runtime, after_commit.undelivered)
        capacity.ring(runtime, after_commit.pools)

    work = partial(do_after_commit, committed)
    follows = jobs, noted, after_commit.looks, after_commit.undelivered, after_commit.announcements, after_commit.pools
    if any(follows):
        borrowed.after_commit(work)
    return work


def do_after_commit(work: Callable[[], None]) -> None:
    """Do the work that follows the caller's commit; never raises, because the commit must not seem to have failed."""
    try:
        work()
    except StoreUnavailableError as error:
        logger.warning("The transaction is committed; the sweeper will publish its messages: %s", error)
    except Exception:
        logger.exception("The transaction is committed; the sweeper will do what should have followed it")

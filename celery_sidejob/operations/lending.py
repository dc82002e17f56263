"""Writing into a transaction that was lent to us: what follows its commit, of which we may never be told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..model.errors import StoreUnavailableError
from ..model.messages import Doorbell
from ..store.borrowed import Borrowed
from ..store.outbox import doorbells
from .noted_asks import apply_noted_asks
from .runtime import Aftermath, Runtime

logger = logging.getLogger("celery_sidejob")


def follow_commit_of(runtime: Runtime, borrowed: Borrowed, aftermath: Aftermath) -> Callable[[], None]:
    """Carry out what follows when the caller's transaction commits; never after its rollback.

    Returns what does it, for a caller who learns of the commit in another way.

    The rows are read again then: a savepoint inside the transaction may have been rolled back.
    """
    jobs = [doorbell.job_id for doorbell in aftermath.doorbells]
    noted = sorted(set(aftermath.noted))

    def committed() -> None:
        try:
            rows = doorbells.waiting(runtime.connections, jobs, unpublished=True) if jobs else ()
            there = {row.job_id for row in rows}
            for move in aftermath.moves:
                if move.job_id in there:
                    runtime.observer.status_changed(*move)
            runtime.dispatch(map(Doorbell.of_row, rows))
            for job_id in noted:
                apply_noted_asks(runtime, [job_id])
        except StoreUnavailableError as error:
            logger.warning("The transaction is committed; the sweeper will publish its jobs: %s", error)
        except Exception:  # the caller's commit is done, and must not seem to have failed
            logger.exception("The transaction is committed; the sweeper will do what should have followed it")

    if jobs or noted:
        borrowed.after_commit(committed)
    return committed

"""The end of a batch: the transaction that notes it also makes the follow-up work, so exactly once, whatever dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..store import batches
from ..store.statement import Transaction
from .runtime import Runtime
from .works import Works, Written, follow_works, write


def end(runtime: Runtime, batch_id: int, prepare: Callable[[Any], list[Works]]) -> bool:
    """Make what follows a batch whose members have all ended; `prepare` makes that ready. False if it goes on.

    If the process dies before the commit, nothing was made, and another sweeper does it.
    """

    def work(executor: Transaction) -> list[tuple[Works, Written]] | None:
        row = batches.lock_if_done(executor, batch_id)
        if row is None:
            return None
        works = prepare(row)
        written = [(one, write(runtime, executor, one)) for one in works]
        batches.end(executor, batch_id)
        return written

    done = runtime.connections.transact("batch", work)
    for works, written in done or ():
        follow_works(runtime, works, written)
    return done is not None

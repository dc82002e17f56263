"""Jobs and messages that the sweeper makes in one of its transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..model.changes import NewJob
from ..model.durable import Message
from ..store import batches, jobs
from ..store.statement import Transaction
from .after_commit import AfterCommit, publish_kept
from .changes.follow_up import follow_up
from .changes.unit_of_work import Applied
from .ledger.keeping import keep_in
from .runtime import LocalRuntime, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Works:
    """New jobs, or messages of a durable task."""

    jobs: Sequence[NewJob] = ()
    messages: Sequence[Message] = ()
    tell: Callable[[], None] = lambda: None
    """Reports the messages once they are kept."""


@dataclass(frozen=True, slots=True)
class Written:
    """Written works, and the work that follows the commit. `last_id` is the last job's, 0 if there is none."""

    last_id: int
    after_commit: AfterCommit
    to_send: Sequence[Message]


def write(runtime: LocalRuntime, executor: Transaction, works: Works) -> Written:
    """Write works in a transaction of ours."""
    last_id, after_commit = 0, AfterCommit()
    if works.jobs:
        ids = jobs.next_ids(executor, len(works.jobs))
        made = [replace(new, id=job_id) for new, job_id in zip(works.jobs, ids, strict=True)]
        after_commit = Applied(runtime, executor, made).done().after_commit
        last_id = made[-1].id
    to_send = keep_in(runtime, executor, works.messages) if works.messages else works.messages
    return Written(last_id, after_commit, to_send)


def follow_works(runtime: Runtime, works: Works, written: Written) -> None:
    """Do the work that follows the commit of works."""
    follow_up(runtime, written.after_commit)
    if written.to_send:
        publish_kept(runtime, written.to_send)
    works.tell()


def end_batch(runtime: Runtime, batch_id: int, prepare: Callable[[Any], list[Works]]) -> bool:
    """Make the calls that follow a batch whose members have all ended; `prepare` prepares them. False if it goes on.

    If the process dies before the commit, nothing was made, and another sweeper makes the calls.
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

"""Members of batches: each joins in the transaction that makes it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar

from ...model import native
from ...model.changes import JoinBatch, NewJob
from ...model.errors import BatchClosedError
from ...store import batches
from ...store.statement import Transaction

_present: ContextVar[int | None] = ContextVar("celery_sidejob_batch", default=None)

present = _present.get
"""Returns the id of the batch of the surrounding block, None outside of a block."""


def within(batch_id: int | None) -> AbstractContextManager[None]:
    """Add the work that is made in the block to the batch; with None to no batch."""
    return native.within(_present, batch_id)


def join_new(executor: Transaction, new: Iterable[NewJob]) -> None:
    """Add new jobs to their batches."""
    of_batch: dict[int, list[int]] = {}
    for job in new:
        if job.batch is not None:
            of_batch.setdefault(job.batch, []).append(job.id)
    for batch_id in sorted(of_batch):
        join(executor, JoinBatch(batch_id, tuple(of_batch[batch_id])))


def join(executor: Transaction, change: JoinBatch) -> None:
    """Add members to a batch; raises BatchClosedError."""
    if not batches.join(executor, change.batch_id, job_ids=change.job_ids, task_ids=change.task_ids):
        name = batches.name_of(executor, change.batch_id)
        raise BatchClosedError(
            "The batch was deleted: nothing is added to it. Open another one."
            if name is None
            else f"Batch {name!r} is closed: nothing is added to it. Open one of another name."
        )


def join_tasks(executor: Transaction, task_ids: Iterable[str]) -> None:
    """Add durable tasks to the batch of the surrounding block, if there is one, in the transaction that keeps them."""
    batch_id = present()
    if batch_id is not None:
        join(executor, JoinBatch(batch_id, task_ids=tuple(task_ids)))

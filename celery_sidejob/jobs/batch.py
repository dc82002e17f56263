"""`Batch`: a named set of jobs and durable tasks, its progress, and the work that follows when all have ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..awaiting import AioOf, Parts, here, wait_until
from ..model.changes import CloseBatch, JoinBatch
from ..model.checks import check_label, shown
from ..model.errors import BatchClosedError, BatchNotFoundError, IllegalMoveError, InvalidValueError, batch_not_found
from ..operations.changes import batches
from ..operations.runtime import Runtime
from ..store import batches as rows
from ..store.statement import Transaction
from ..unit.open_unit import active, submit
from .job import Job
from .works import Following, Written, following_of, works_of, write

if TYPE_CHECKING:
    from ..aio import AioBatch


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """How many members a batch has, and how they have ended. Durable tasks in the dead set have failed."""

    total: int
    completed: int
    failed: int
    terminated: int

    @property
    def done(self) -> int:
        """How many members have ended, in whatever way."""
        return self.completed + self.failed + self.terminated

    @property
    def open(self) -> int:
        """How many members have not ended."""
        return self.total - self.done


class Batch:
    """A batch, by its name. As a context manager it adds the work that its block makes, and closes at the end."""

    aio: AioOf[AioBatch] = AioOf("AioBatch")
    """The verbs as coroutines."""

    def __init__(self, row: Any, *, runtime: Runtime) -> None:
        self.name: str = row.name
        self._id: int = row.id
        self._runtime = runtime
        self._block: AbstractContextManager[None] | None = None

    def __repr__(self) -> str:
        return f"<Batch {self.name}>"

    def __enter__(self) -> Batch:
        """Add the jobs that are made in the block, and the durable tasks that are called there, to the batch."""
        self._block = batches.within(self._id)
        self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the batch; after an error it stays open, for another block of this name or for `close()`."""
        assert self._block is not None
        self._block.__exit__(kind, error, trace)
        self._block = None
        if kind is None:
            self.close()

    def add(self, *works: Any) -> Batch:
        """Add jobs that were made elsewhere, or durable tasks by their results; raises BatchClosedError."""
        job_ids, task_ids = [], []
        for work in works:
            if isinstance(work, Job):
                job_ids.append(work.id)
            elif isinstance(getattr(work, "task_id", None), str):
                task_ids.append(work.task_id)
            else:
                raise InvalidValueError(
                    f"add() takes jobs and the results of calls of durable tasks, not {shown(work)}."
                )
        submit(self._runtime, "batch", JoinBatch(self._id, tuple(job_ids), tuple(task_ids)))
        return self

    def close(self) -> Batch:
        """Close the batch: it takes no more members, and ends when all of them have. In a run the commit does this."""
        submit(self._runtime, "batch", CloseBatch(self._id))
        return self

    def delete(self) -> None:
        """Remove the batch: no call follows it, and its members go on."""
        self._runtime.connections.transact("batch", lambda executor: rows.delete(executor, self._id), single=True)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> BatchCounts:
        """How many members it has, and how they have ended; asks the store, which reads every member."""
        row = rows.counts(self._runtime.connections, self._id)
        return BatchCounts(row.total, row.completed, row.failed, row.terminated)

    @property
    def progress(self) -> float:
        """The ended share of its members, from 0.0 to 1.0; an empty batch has 1.0 once it is closed."""
        counts = self.counts
        return counts.done / counts.total if counts.total else float(self._read().closed_at is not None)

    @property
    def closed(self) -> bool:
        """Whether it is closed to new members."""
        return self._read().closed_at is not None

    @property
    def ended_at(self) -> datetime | None:
        """When its last member had ended and the calls that follow it were made; None before that."""
        found: datetime | None = self._read().ended_at
        return found

    @property
    def jobs(self) -> list[Job]:
        """Its jobs, in the order in which they were added, without those that were deleted."""
        return [Job(each, runtime=self._runtime) for each in rows.job_ids(self._runtime.connections, self._id)]

    def wait(self, timeout: float | None = None) -> Batch:
        """Block until the batch has ended; for clients, not for runs. Raises TimeoutError after `timeout` seconds."""
        return here(self._waited(timeout))

    def _waited(self, timeout: float | None = None) -> Parts[Batch]:
        if active() is not None:
            raise IllegalMoveError(
                f"wait() for batch {self.name!r} inside a run would block its worker; give it on_complete=."
            )
        if not (yield from wait_until(lambda: self.ended_at is not None, timeout)):
            counts = yield lambda: self.counts
            raise TimeoutError(f"Batch {self.name!r} has not ended after {timeout} s: {counts}.")
        return self

    def _read(self) -> Any:
        row = rows.read(self._runtime.connections, self.name)
        if row is None or row.id != self._id:
            raise BatchNotFoundError(
                f"There is no batch {self.name!r} any more: it was deleted, or replaced by another."
            )
        return row


def open_batch(runtime: Runtime, name: str, calls: Mapping[str, Any]) -> Batch:
    """Return the open batch of this name, which takes members; make it if there is none."""
    check_label("name", name)
    follows = {key: following_of(runtime, key, call) for key, call in calls.items() if call is not None}
    text = json.dumps(follows)

    def work(executor: Transaction) -> Any:
        return rows.open_(executor, name, text) or rows.read(executor, name)

    with batches.within(None):
        row = runtime.connections.transact("batch", work)
    if row.closed_at is not None:
        raise BatchClosedError(f"Batch {name!r} is closed, and has not ended: open one of another name, or wait().")
    if follows and json.loads(row.calls) != json.loads(text):
        raise InvalidValueError(
            f"Batch {name!r} is open with other calls of on_complete=, on_success= and on_failure=: leave them out."
        )
    return Batch(row, runtime=runtime)


def get_batch(runtime: Runtime, name: str) -> Batch:
    """Return the batch of this name; raises BatchNotFoundError."""
    row = rows.read(runtime.connections, name)
    if row is None:
        raise batch_not_found(name)
    return Batch(row, runtime=runtime)


def settle(runtime: Runtime, batch_id: int) -> bool:
    """Note which members of a batch have ended, and make the calls that follow if all have; returns if all have."""
    while True:
        seen = runtime.connections.transact("batch", lambda executor: rows.note_ends(executor, batch_id), single=True)
        if not seen.noted:
            break
    return not seen.looked_at and _end(runtime, batch_id)


def settle_all(runtime: Runtime) -> None:
    """Settle all batches that have not ended, one after the other."""
    batch_id = rows.next_unended(runtime.connections, after=0)
    while batch_id is not None:
        settle(runtime, batch_id)
        batch_id = rows.next_unended(runtime.connections, after=batch_id)


def _end(runtime: Runtime, batch_id: int) -> bool:
    """Make the calls that follow a batch whose members have all ended; False if it goes on.

    If the process dies before the commit, nothing was made, and another sweeper makes the calls.
    """

    def work(executor: Transaction) -> list[Written] | None:
        row = rows.lock_if_done(executor, batch_id)
        if row is None:
            return None
        written = [write(runtime, executor, works) for works in works_of(runtime, _follows(row))]
        rows.end(executor, batch_id)
        return written

    done = runtime.connections.transact("batch", work)
    for written in done or ():
        written.follow(runtime)
    return done is not None


def _follows(row: Any) -> Iterable[Following]:
    calls = json.loads(row.calls)
    wanted = ("on_complete", "on_failure" if row.has_failures else "on_success")
    return [calls[key] for key in wanted if key in calls]

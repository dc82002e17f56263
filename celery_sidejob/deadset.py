"""The dead set: jobs that rest as failed, and messages of ordinary tasks, until a person decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .job import Job
from .model.errors import JobNotFoundError
from .operations import durable as operations
from .operations.runtime import Runtime
from .store import dead

PAGE = 200


@dataclass(frozen=True, slots=True)
class DeadEntry:
    """One entry: what died, why, and when."""

    id: int
    job_id: int | None
    """The job; None for an ordinary durable task, whose message is kept here."""
    task_id: str | None
    task: str
    queue: str
    reason: str
    error: str
    traceback: str | None
    died_at: datetime
    retries: int

    @property
    def group(self) -> str:
        """What the entry is grouped by: the task and the kind of error."""
        return f"{self.task}: {self.error.partition(':')[0]}"


class DeadSet:
    """A view of the dead set; nothing is kept in memory."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __len__(self) -> int:
        return dead.count(self._runtime.connections)

    def __bool__(self) -> bool:
        """The set is true, also an empty one."""
        return True

    def __iter__(self) -> Iterator[DeadEntry]:
        """Iterate over all entries, oldest first, a page at a time."""
        after = 0
        while rows := dead.page(self._runtime.connections, after=after, limit=PAGE):
            yield from map(self._entry, rows)
            after = rows[-1].id

    def get(self, entry_id: int) -> DeadEntry:
        """Return one entry; raises JobNotFoundError if it is not there (any more)."""
        row = dead.get(self._runtime.connections, entry_id)
        if row is None:
            raise JobNotFoundError(f"The dead set has no entry {entry_id}: it was retried or deleted, or never was.")
        return self._entry(row)

    def retry(self, entry_id: int) -> Any:
        """Have the entry tried again, which leaves the dead set with that.

        A job is forced to run, and returned. The message of an ordinary task is published again with its own task id,
        its losses forgotten and without what is left of its `expires`; returns its Celery result.
        """
        entry = self.get(entry_id)
        if entry.job_id is None:
            operations.revive(self._runtime, entry_id, entry.task_id)
            return self._runtime.tasks.result(str(entry.task_id))
        job = Job(entry.job_id, runtime=self._runtime)
        asked = job.run(force=True)
        return asked if asked is not None else job

    def _entry(self, row: Any) -> DeadEntry:
        hide = self._runtime.settings.redacted
        return DeadEntry(
            id=row.id, job_id=row.job_id, task_id=row.task_id, task=row.task, queue=row.queue, reason=row.reason,
            error=str(hide(row.error or "")), traceback=None if row.traceback is None else str(hide(row.traceback)),
            died_at=row.died_at, retries=row.retries,
        )  # fmt: skip

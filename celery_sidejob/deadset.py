"""The dead set: jobs that rest as failed, and messages of ordinary tasks, until a person decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from .job import Job
from .model.errors import InvalidValueError, JobNotFoundError
from .model.status import Status
from .operations import durable as operations
from .operations.deletion import delete_finished
from .operations.runtime import Runtime
from .store import dead

PAGE = 200
DELETABLE = frozenset({Status.COMPLETED, Status.TERMINATED, Status.FAILED})


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
    losses: int = 0
    """Of an ordinary task: how many of its runs were lost with their workers."""
    arguments: str | None = None
    """Of an ordinary task: its arguments as Celery shows them; those of a job are in `Job.info`."""
    history: tuple[Mapping[str, Any], ...] = ()
    """Of an ordinary task that was taken out of the dead set before: `at`, `reason` and `error` of each death."""

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
        return self._all()

    def list(
        self, *, group: str | None = None, task: str | None = None, queue: str | None = None, limit: int = 100,
        after: int = 0,
    ) -> Sequence[DeadEntry]:  # fmt: skip
        """Return up to `limit` entries that match, oldest first, from the id `after` (exclusive) on."""
        _count("limit", limit)
        rows = dead.page(
            self._runtime.connections, after=after, limit=limit, task_group=group, task=task, queue=queue
        )  # fmt: skip
        return [self._entry(row) for row in rows]

    def groups(self) -> dict[str, int]:
        """Count all entries by task and kind of error, the largest group first."""
        return dead.groups(self._runtime.connections)

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
            if not operations.revive(self._runtime, [entry_id]):
                raise operations.not_revived(entry_id, entry.task_id)
            return self._runtime.tasks.result(str(entry.task_id))
        return self._force(entry.job_id)

    def retry_all(self, *, group: str | None = None, task: str | None = None, limit: int | None = None) -> int:
        """Have all entries that match tried again, oldest first, at most `limit`; returns how many left the dead set.

        Messages of ordinary tasks a page at a time, each in one statement. An entry that was buried after this was
        called is left alone, so that what fails again is not tried for ever.
        """
        if limit is not None:
            _count("limit", limit)
        retried, after, last = 0, 0, dead.last_id(self._runtime.connections)
        while after < last and (limit is None or retried < limit):
            page = PAGE if limit is None else min(PAGE, limit - retried)
            entries = self.list(group=group, task=task, limit=page, after=after)
            if not entries:
                break
            after = entries[-1].id
            entries = [entry for entry in entries if entry.id <= last]
            messages = [entry.id for entry in entries if entry.job_id is None]
            if messages:
                retried += operations.revive(self._runtime, messages)
            for entry in entries:
                if entry.job_id is not None:
                    self._force(entry.job_id)
                    retried += 1
        return retried

    def delete(self, entry_id: int) -> bool:
        """Remove an entry for good, a job with everything below it; False if something below is not finished."""
        return self._delete(self.get(entry_id))

    def purge(self, *, older_than: timedelta | float | None = None, keep: int | None = None) -> int:
        """Remove entries older than this (a timedelta or seconds), and all but the newest `keep`; returns how many."""
        if older_than is None and keep is None:
            raise InvalidValueError("purge() takes older_than= or keep=: what is to go?")
        if keep is not None:
            _count("keep", keep, least=0)
        age_s = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
        connections = self._runtime.connections
        below = dead.id_before_the_newest(connections, keep) if keep is not None else 0
        purged, after = 0, 0
        while rows := dead.old_page(connections, after=after, age_s=age_s, below=below, limit=PAGE):
            after = rows[-1].id
            purged += sum(self._delete(self._entry(row)) for row in rows)
        return purged

    # ------------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[DeadEntry]:
        after = 0
        while rows := dead.page(self._runtime.connections, after=after, limit=PAGE):
            yield from map(self._entry, rows)
            after = rows[-1].id

    def _force(self, job_id: int) -> Job:
        job = Job(job_id, runtime=self._runtime)
        asked = job.run(force=True)
        return asked if asked is not None else job

    def _delete(self, entry: DeadEntry) -> bool:
        if entry.job_id is None:
            return dead.delete_message(self._runtime.connections, entry.id)
        return delete_finished(self._runtime, entry.job_id, DELETABLE)

    def _entry(self, row: Any) -> DeadEntry:
        hide = self._runtime.settings.redacted
        return DeadEntry(
            id=row.id, job_id=row.job_id, task_id=row.task_id, task=row.task, queue=row.queue, reason=row.reason,
            error=str(hide(row.error or "")), traceback=None if row.traceback is None else str(hide(row.traceback)),
            died_at=row.died_at, retries=row.retries, **(_of_message(row.payload, hide) if row.job_id is None else {}),
        )  # fmt: skip


def _of_message(payload: str, hide: Callable[[Any], Any]) -> dict[str, Any]:
    """Return what is shown of a kept message; its body is not decoded. Nothing of one that this version cannot read."""
    try:
        kept = json.loads(payload)
        publication = json.loads(kept["publication"])
        headers = json.loads(publication["about"]).get("headers", {})
    except (ValueError, LookupError, TypeError):
        return {}
    shown = [str(hide(text)) for text in (headers.get("argsrepr"), headers.get("kwargsrepr")) if text]
    return {
        "losses": kept.get("losses", 0),
        "arguments": " ".join(shown) or None,
        "history": tuple(publication.get("deaths") or ()),
    }


def _count(name: str, number: int, *, least: int = 1) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise InvalidValueError(f"{name} is a number of entries, at least {least}, not {number!r}.")

"""`Queue`: pauses a queue, sets its limits, and reads its contents."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ..awaiting import AioOf
from ..model.checks import check_number, check_texts
from ..model.errors import InvalidValueError
from ..model.queue import RATE_UNITS, UNCHANGED, QueueSettings, Rate, without_pool
from ..operations.gates import queues
from ..operations.runtime import Runtime
from ..store import queues as rows
from ..store.queues import ManagedQueue
from .job import Job

if TYPE_CHECKING:
    from ..aio import AioQueue


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """How many jobs and durable tasks of a queue wait, run, or may not begin yet.

    `waiting`: they may begin now, or wait at the queue's gate. `scheduled`: they wait for their time, a backoff or
    their own rate. `blocked`: they wait for other jobs, for a slot of a pool, or for a worker that knows their task.
    `lost`: their worker was declared dead, and they are about to be rescued.
    """

    waiting: int
    running: int
    scheduled: int
    blocked: int
    lost: int


class Queue:
    """A queue; equal and hashable by its name. It is managed once it has been declared, paused or configured."""

    aio: AioOf[AioQueue] = AioOf("AioQueue")
    """The verbs as coroutines."""

    def __init__(self, name: str, *, runtime: Runtime) -> None:
        check_texts(queue=name)
        if not name:
            raise InvalidValueError("The name of a queue cannot be empty.")
        self.name = name
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"<Queue {self.name}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Queue) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    # -- the gate ------------------------------------------------------------------------------------------------

    def pause(self, reason: str | None = None) -> None:
        """Let no further run of this queue begin, on any worker, even of fetched messages; runs in progress go on.

        The pause lasts until `resume()`, and survives any restart. Pausing a paused queue changes only the reason. If
        the queue was not managed before, a repeatable durable task that a worker has already fetched may still begin
        for up to `sidejob_heartbeat_interval`.
        """
        check_texts(reason=reason)
        queues.pause(self._runtime, self.name, reason)

    def resume(self) -> None:
        """Let runs begin again; work that waited at the gate is published within about a second, the oldest first."""
        queues.resume(self._runtime, self.name)

    @property
    def paused(self) -> bool:
        """Whether the queue is paused; asks the store."""
        return self.paused_at is not None

    @property
    def paused_at(self) -> datetime | None:
        """When the queue was paused; None if it is not."""
        return self._read().paused_at

    @property
    def pause_reason(self) -> str | None:
        """Why the queue was paused, as given to `pause`."""
        return self._read().pause_reason

    # -- settings ------------------------------------------------------------------------------------------------

    def configure(
        self,
        *,
        ordered: bool = UNCHANGED,
        limit: int | None = UNCHANGED,
        limit_per_key: int | None = UNCHANGED,
        rate: str | float | None = UNCHANGED,
    ) -> Queue:
        """Change settings at once, for all workers; a setting that is not given stays, and None removes a limit.

        `ordered`: jobs are served exactly by priority, then by due time. (Every other setting makes the queue do this
        too.) `limit`: how many jobs and durable tasks run at once, over all workers. `limit_per_key`: how many jobs
        with the same `limit_key` run at once; keys are served one after the other. `rate`: runs that begin in a second,
        minute or hour, such as "600/m". Lower limits stop no run. Raises InvalidValueError before anything is changed.

        A setting stays until another call changes it, or the declaration in `sidejob_queues` changes.
        """
        changes = {"ordered": ordered, "limit": limit, "limit_per_key": limit_per_key, "rate": rate}
        queues.configure(self._runtime, self.name, changes)
        return self

    def unmanage(self) -> bool:
        """Remove all settings and the pause, for all workers; returns whether the queue was managed.

        Work that waited at the gate is published within about a second. From now on each message begins the job that it
        names. Raises InvalidValueError if `sidejob_queues` declares the queue: the next worker to start would manage it
        again.
        """
        if without_pool((self._runtime.settings.queues or {}).get(self.name, {})):
            raise InvalidValueError(
                f"Queue {self.name!r} is declared in sidejob_queues, so the next worker to start would manage it "
                "again. Remove it from sidejob_queues first."
            )
        return queues.unmanage(self._runtime, self.name)

    @property
    def managed(self) -> bool:
        """Whether the queue is managed; asks the store."""
        return self.name in rows.read(self._runtime.connections, [self.name])

    @property
    def ordered(self) -> bool:
        """Whether exact order was asked for."""
        return self._read().settings.ordered

    @property
    def limit(self) -> int | None:
        """How many runs may be in progress at once; None without a limit."""
        return self._read().settings.limit

    @property
    def limit_per_key(self) -> int | None:
        """How many runs with the same `limit_key` may be in progress at once; None without a limit."""
        return self._read().settings.limit_per_key

    @property
    def rate(self) -> str | None:
        """How many runs may begin, as it was given: "600/m"; None without a rate."""
        rate = self._read().settings.rate
        return None if rate is None else rate_in_text(rate)

    # -- contents ------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> QueueCounts:
        """How many jobs and durable tasks wait and run; asking for it reads the whole queue."""
        row = rows.counts(self._runtime.connections, self.name)
        return QueueCounts(row.waiting, row.running, row.scheduled + row.timers, row.blocked, row.lost)

    def peek(self, limit: int = 25) -> list[Job]:
        """Return the next jobs in the order of service, without any effect; without durable tasks."""
        check_number("limit", limit, least=0, of="jobs")
        return [Job(job_id, runtime=self._runtime) for job_id in queues.peek(self._runtime, self.name, limit=limit)]

    # ------------------------------------------------------------------------------------------------------------

    def _read(self) -> ManagedQueue:
        """Return its row; a queue that is not managed has no settings and no pause."""
        none = ManagedQueue(self.name, QueueSettings(), paused_at=None, pause_reason=None, declared=None)
        return rows.read(self._runtime.connections, [self.name]).get(self.name, none)


def rate_in_text(rate: Rate) -> str:
    """Return a rate as it was given: in the unit whose number is the burst, the largest unit if several fit."""
    units = [(round(seconds / rate.interval_s, 9), unit) for unit, seconds in RATE_UNITS.items()]
    runs, unit = max(found for found in units if max(1, int(found[0])) == rate.burst)
    return f"{runs:.10g}/{unit}"

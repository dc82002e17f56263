"""Why work does not run now; and parking, which makes declined work wait.

A worker declines work if it does not know the task, or cannot read the message. In a rolling deploy, workers of two
versions serve a queue. If none of them knows a task, its work is parked until a worker says that it knows the task. The
message of other work is sent again until it reaches a worker that can run it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..model.checks import shown
from ..model.errors import InvalidValueError
from ..model.events import JobParked, TaskParked
from ..model.logger import logger
from ..store import jobs, parked, registry, waiting, workers
from ..store.outbox.kinds import JOBS, Kind
from ..store.statement import Transaction
from .runtime import LocalRuntime, Runtime

NO_WORKER = "no worker"
REASONS = ("dependencies", "timer", "retry", "pause", "limit", "rate", "pool", "room", NO_WORKER)
"""The reasons why a job's next run may not begin, in the order in which they are reported."""
LONGEST_S = 600.0
"""The longest delay, in seconds, before a message that a worker could not read is sent again."""


def check_reason(reason: Any) -> None:
    """Raise InvalidValueError if this is no reason."""
    if reason not in REASONS:
        raise InvalidValueError(f"waiting_for is one of {', '.join(REASONS)}; not {shown(reason)}.")


def waiting_for(runtime: Runtime, job_id: int) -> list[str] | None:
    """Return the reasons why a job's next run does not begin; none if it may, is in progress, or is not owed.

    A reason is `dependencies`, `timer`, `retry`, `pause`, `limit`, `rate`, `pool`, `room` or `no worker`. Dependencies:
    other jobs have not completed. Pool: it has no slot of its capacity pool. Room: the last run has written to a full
    port, and a run is owed when its reader has made room. No worker: the job is parked, or its run is due and no live
    worker of its queue knows the task; a starting worker that has not recorded its tasks yet counts as knowing the
    task. Returns None if there is no such job.
    """
    return runtime.connections.transact("inspect", lambda executor: reasons(executor, runtime, [job_id])).get(job_id)


def is_parked(runtime: Runtime, job_id: int) -> bool:
    """Tell whether a job is parked: no worker of its queue knew its task when its message came."""
    return any(row.is_parked for row in waiting.conditions(runtime.connections, [job_id]))


def reasons(executor: Transaction, runtime: LocalRuntime, job_ids: Iterable[int]) -> dict[int, list[str]]:
    """Return the result of `waiting_for` for each job, as the transaction sees it; a job that is gone is missing."""
    rows = waiting.conditions(executor, job_ids)
    due = {(row.task, row.queue) for row in rows if row.is_due}
    silent = workers.silent(executor, runtime.settings) if due else []
    served = {one: registry.serves(executor, *one, silent) for one in due}
    starting = not all(served.values()) and bool(registry.unannounced(executor, silent))
    return {row.id: _reasons(row, is_served=starting or served.get((row.task, row.queue), True)) for row in rows}


def _reasons(row: Any, *, is_served: bool) -> list[str]:
    found = [reason for reason in REASONS if reason != NO_WORKER and getattr(row, f"waits_for_{reason}")]
    return [*found, NO_WORKER] if row.is_parked or (row.is_due and not is_served) else found


# -- parking -----------------------------------------------------------------------------------------------------------


def decline(runtime: Runtime, kind: Kind, key: tuple[Any, int], *, task: str, unread: str | None = None) -> bool:
    """Make a received message wait that this worker cannot run; True if all workers have declined it for too long.

    `unread`: why it cannot be read here; otherwise its task is unknown here, and it is parked. It is not parked if a
    live worker of the queue knows the task, nor in a store where workers do not record their tasks: then the message is
    sent again within seconds. If the process dies before the commit, the message counts as missing and is sent again
    too.
    """
    may_park = unread is None and runtime.store.place == 0

    def work(executor: Transaction) -> tuple[Any | None, Any | None]:
        if kind is JOBS:  # otherwise an uncommitted termination would not see that it is parked
            jobs.lock(executor, [key[0]])
        if may_park:
            parked.take_turn(executor)
            row = parked.park(executor, kind, key, task=task)
            if row is not None:
                return row, None
        # If a worker knows the task, chance decides which worker gets the message: a longer delay would only slow a
        # rollout.
        longest_s = runtime.settings.lost_after / 6 if unread is None else LONGEST_S
        return None, parked.send_again(executor, kind, key, task=task, longest_s=longest_s)

    row, sent_again = runtime.connections.transact("park", work)
    shown = f"{'job' if kind is JOBS else 'task'} {key[0]} ({task})"
    if row is None:
        _tell_of_message(shown, sent_again, unread)
        return sent_again is not None and sent_again.given_up and not may_park
    event = JobParked(key[0], task, row.queue) if kind is JOBS else TaskParked(key[0], task, row.queue)
    runtime.observer.tell(event)
    if row.terminating:
        logger.warning(
            "%s is terminated without its shutdown in %g seconds, unless a worker comes to know the task.",
            _capital(shown),
            parked.SHUTDOWN_WAITS_S,
        )
    return False


def _tell_of_message(shown: str, sent_again: Any | None, unread: str | None) -> None:
    """Log the fate of a message that is not parked; `sent_again` is None if the run that it announces is not owed."""
    if sent_again is None:
        logger.info(
            "A message of %s is dropped: this worker cannot run it, and the run that it announces is not owed, or has "
            "begun. Nothing is lost, and there is nothing to do.",
            shown,
        )
        return
    wait_s = math.ceil(sent_again.wait_s)
    if unread is not None:
        logger.warning(
            "%s is not run here: this worker cannot read its message (%s). Nothing is lost: it is sent again in %d "
            "seconds, to any worker of its queue. A durable task that none can read goes to the dead set after %s.",
            _capital(shown),
            unread,
            wait_s,
            parked.PATIENCE,
        )
        return
    logger.warning(
        "%s is not run here: this worker does not know the task, but another of its queue does. Nothing is lost: its "
        "message is sent again in %d seconds, to any of them. To avoid this, start this worker with the code of the "
        "task, or give the task a queue of its own.",
        _capital(shown),
        wait_s,
    )


def _capital(shown: str) -> str:
    return shown[0].upper() + shown[1:]


def serve(executor: Transaction, worker_id: int, *, queues: Sequence[str], tasks: Sequence[str]) -> Any:
    """Record the tasks that a worker serves, and release the first of the messages that are parked for it.

    It is one transaction: a later parking sees this worker, and this worker sees every earlier parking.
    Returns how many `runs` were released, and whether it `goes_on`: then call it again. If the process dies before
    that, another worker that serves the task releases the rest, or this worker's successor does.
    """
    parked.take_turn(executor)
    registry.note_served(executor, worker_id, queues=queues, tasks=tasks)
    return parked.release(executor, queues=queues, tasks=tasks)

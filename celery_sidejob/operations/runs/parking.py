"""Lets declined work wait: the worker does not know its task, or cannot read its message.

In a rolling deploy, workers of two versions serve a queue. If none of them knows a task, its work is parked until a
worker says that it knows the task. The message of other work is sent again until it reaches a worker that can run it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...model.events import JobParked, TaskParked
from ...model.logger import logger
from ...store import jobs, parked, registry
from ...store.outbox.kinds import JOBS, Kind
from ...store.statement import Transaction
from ..runtime import Runtime

LONGEST_S = 600.0
"""The longest delay, in seconds, before a message that a worker could not read is sent again."""


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

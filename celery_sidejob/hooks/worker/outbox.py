"""The rows of the outbox as a worker's connection to the broker meets them, where the store is the broker."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

from celery import Celery

from ...model.crash_points import reach
from ...model.durable import Held, HeldRun, Message
from ...model.errors import InvalidValueError
from ...model.logger import logger
from ...model.messages import Doorbell
from ...services.heartbeat.deliveries import GRACE_S
from ...store.broker.holds import NOBODY, Holder
from ...transport.decoding import Payload
from ...transport.postgres.acknowledgements import Page
from ..durability import REQUEUE, is_durable, lost_policy
from ..messages import doorbell, kept_message
from ..messages.carried import NewerFormatError
from .delivered import is_busy

T = TypeVar("T")


SURE_S = GRACE_S / 2
"""The oldest fetch that counts when its message is received. Later, the heartbeat might give up the rows held here."""


def held_run(held: Held, row: Any, asked_at: float) -> HeldRun:
    """Return how a worker holds the row of a message that it receives now, and has fetched since `asked_at`."""
    return HeldRun(held, row.queue, row.waited_s, stands=monotonic() - asked_at < SURE_S)


class WorkerOutbox:
    """Implements the transport's `Outbox` for one connection of this worker."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        most = app.sidejob.settings.max_losses
        self._may_repeat = {
            name: losses
            for name, task in app.tasks.items()
            if is_durable(app, name)
            and lost_policy(task) == REQUEUE
            and (losses := getattr(task, "max_losses", None) or most) > 1  # else its first loss is to count
        }
        self._asked, self._asked_at = NOBODY, 0.0

    def asks(self) -> Holder:
        """Return in whose name the fetch that follows at once holds rows; `NOBODY` if that is not known just now."""
        heartbeat, self._asked_at = self._app.sidejob.heartbeat, monotonic()
        knows = heartbeat is not None and heartbeat.may_claim
        self._asked = Holder(heartbeat.worker_id, self._may_repeat) if knows else NOBODY
        return self._asked

    @property
    def is_busy(self) -> bool:
        """Whether a fetch may wait: see `delivered.is_busy`."""
        return is_busy()

    def compose(self, row: Any) -> Payload | None:
        """Return the message that a fetched reference leads to, with the hold of its row if it was held."""
        found = message_of(self._app, row)
        if found is not None and getattr(row, "held_at", None) is not None:
            found.held = held_run(self._held(row), row, self._asked_at)
        return found

    def unhold(self, rows: Sequence[Any]) -> None:
        """Give back rows that were held with their fetch."""
        self._app.sidejob.heartbeat.tasks.unhold(*map(self._held, rows))

    def with_ends(self, statement: Callable[[Page], T]) -> T:
        """Run a statement that is to remove the rows of runs that are over."""

        def reached(page: Page) -> T:
            if page.runs:
                reach("durable-end:before-commit")
            found = statement(page)
            if page.runs:
                over, page.over = page.over, None  # should a test have the answer lost here, nobody knows
                reach("durable-end:after-commit")
                page.over = over
            return found

        done: T = self._app.sidejob.heartbeat.tasks.ends.go_with(reached)
        return done

    def _held(self, row: Any) -> Held:
        return Held(row.task_id, row.generation, self._asked.worker_id, row.held_at, row.id)


def message_of(app: Celery, row: Any) -> Payload | None:
    """Return kombu's message for a fetched reference and its row; None if no run is owed any more.

    Also None for a row that is unreadable here: it is sent again when it has been silent for a while, perhaps to a
    newer worker, and the sweeper buries rows that are unreadable for all.
    """
    try:
        found = _in_kombus_form(app, row)
    except (InvalidValueError, NewerFormatError) as error:
        logger.warning("A message in queue %s is left: %s", row.queue, error)
        return None
    if found is None:
        return None
    properties = found["properties"]  # kombu's transports have the priority in both places; Celery reads this one
    properties["priority"] = properties["delivery_info"]["priority"]
    return Payload(found)


def _in_kombus_form(app: Celery, row: Any) -> dict[str, Any] | None:
    if row.job_id is not None:
        options = json.loads(row.options) if row.options else None
        bell = Doorbell(row.job_id, row.generation, row.task_id, row.task, row.queue, row.priority, options)
        return doorbell.delivered(app, bell)
    if row.kept is None:
        return None
    message = Message(
        row.task_id,
        row.task,
        row.queue,
        row.publication,
        bytes(row.kept),
        row.generation,
        expires_at=row.expires_at,
        again=row.again or row.returns > 0,
    )
    return kept_message.delivered(message)

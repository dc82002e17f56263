"""Many messages by one COPY, behind kombu's `Producer.batch`: all of them are sent, or none."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from kombu.exceptions import BatchPublishError

from ...store.broker import messages
from ...store.statement import Transaction
from .link import ring_of_queue


@dataclass(slots=True)
class Lent:
    """A transaction of a caller's, into which batches are written that are begun while it is in `LENT`."""

    transaction: Transaction
    queues: dict[str, None] = field(default_factory=dict)
    """Where messages were put, in order: to be rung for after its commit."""


LENT: ContextVar[Lent | None] = ContextVar("celery_sidejob_lent", default=None)


class PublishBatch:
    """A batch of one producer. After a flush has failed it takes nothing any more."""

    def __init__(self, channel: Any, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._rows: list[messages.Row] = []
        self._failed: BaseException | None = None
        self._closed = False
        self._lent = LENT.get()

    def publish(self, message: Any, **options: Any) -> Any:
        """Route one message; sends what has gathered if that is enough."""
        self._check_usable()
        result = self.channel.basic_publish(message, _publish_batch=self, **options)
        if len(self._rows) >= self._max_size:
            self.flush()
        return result

    def add(self, row: messages.Row) -> None:
        """Add a message for one queue."""
        self._rows.append(row)

    def flush(self) -> None:
        """Send all that has gathered."""
        self._check_usable()
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._lent is not None:
            for row in rows:
                messages.put(self._lent.transaction, row)
                self._lent.queues[row.queue] = None
            return
        link = self.channel.link
        try:
            link.run("copy", lambda executor: messages.put_all(executor, rows))
        except BaseException as error:
            self._failed = error
            if not isinstance(error, Exception):
                raise
            raise BatchPublishError(
                "a batch was not sent, or its answer was lost: it was sent as a whole then"
            ) from error
        for queue in dict.fromkeys(row.queue for row in rows):
            link.ring_apart(ring_of_queue(queue))

    def discard(self) -> None:
        """Forget what was not sent yet."""
        self._rows = []
        self._closed = True

    def close(self) -> None:
        """Take nothing any more."""
        self.discard()

    def _check_usable(self) -> None:
        if self._failed is not None:
            raise BatchPublishError("this batch has failed before") from self._failed
        if self._closed:
            raise RuntimeError("this batch is closed")

"""Give kept messages to the broker and mark their rows; the sweeper publishes messages that the broker did not take."""

from __future__ import annotations

from collections.abc import Sequence

from ..model.durable import Key, Message
from ..model.errors import StoreUnavailableError
from ..model.logger import logger
from ..model.protocols import Refused
from ..store.outbox import references
from ..store.outbox.kinds import TASKS
from . import deduplication
from .after_commit import mark
from .runtime import Runtime


def publish_kept(runtime: Runtime, messages: Sequence[Message]) -> int:
    """Publish kept messages; returns how many the broker took. A broker that is down costs some time.

    The sweeper checks such rows only after `FIRST_CHECK_S`, and skips those that a run has begun by then. The mark of
    publication may therefore wait: one statement writes all marks of one second, and most rows are gone by then. A
    death before the mark costs one more copy, and so does a publisher that is slower than the sweeper.

    If the store is the broker, the rows were kept together with references, and workers are only woken.
    """
    queues: dict[str, None] = {}
    unsent: list[Message] = []
    for message in messages:
        if sends(runtime, message):
            queues[message.queue] = None
        else:
            unsent.append(message)
    if queues:
        runtime.publisher.ring_queues(list(queues))
    if not unsent:
        return len(messages)  # all or none, as after most runs
    published = _give_to_broker(runtime, unsent)
    mark(runtime, TASKS, published, later=True, again=False)
    return len(messages) - len(unsent) + len(published)


def sends(runtime: Runtime, message: Message) -> bool:
    """Tell whether the statement that keeps this message also sends it: the store is the broker."""
    return runtime.connections.is_broker and message.priority is not None


def publish_and_mark(runtime: Runtime, messages: Sequence[Message], *, refused: Refused | None = None) -> int:
    """Publish due messages, mark at once those that the broker took, and return their number.

    If the store is the broker, they get references there instead.
    """
    referred = _refer(runtime, messages) if runtime.connections.is_broker and messages else set()
    messages = [message for message in messages if (message.task_id, message.generation) not in referred]
    published = _give_to_broker(runtime, messages, refused=refused)
    mark(runtime, TASKS, published, later=False)
    return len(referred) + len(published)


def _refer(runtime: Runtime, messages: Sequence[Message]) -> set[Key]:
    """Put references to messages into their queues in the store that is the broker; return the keys of those messages.

    The publisher handles the others: an exchange routes them, or they are unreadable.
    """
    own = runtime.publisher.to_own_queue(messages)
    try:
        runtime.connections.transact("publish", lambda executor: references.send_tasks(executor, own), single=True)
    except StoreUnavailableError as error:
        logger.warning("Could not send what was kept; the sweeper does it: %s", error)
    runtime.publisher.ring(own)
    return {(message.task_id, message.generation) for message in own}


# --------------------------------------------------------------------------------------------------------------------


def _give_to_broker(runtime: Runtime, messages: Sequence[Message], *, refused: Refused | None = None) -> list[Key]:
    """Give messages to the broker in order; return the keys of the messages that it took."""
    try:
        messages = deduplication.addressed(runtime, messages)
    except StoreUnavailableError as error:
        logger.warning("The sweeper will publish messages kept in a store that does not answer: %s", error)
        return []
    sent = runtime.publisher.publish(messages, refused=refused)
    return [(message.task_id, message.generation) for message in sent if isinstance(message, Message)]

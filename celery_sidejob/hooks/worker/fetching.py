"""How a worker is kept from fetching more than it has appetite for: it asks for less, or tells RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any

from amqp.exceptions import ChannelError, RecoverableConnectionError
from celery.concurrency.solo import TaskPool as Solo
from celery.worker import state

from ..patches import connections
from .appetite import LOOK_S, Appetite, Fetcher
from .delivered import Delivered, is_busy

UNLIMITED = 65535
"""The largest prefetch that RabbitMQ accepts."""


class FromChannel(Fetcher):
    """From a channel that asks its QoS before it fetches, so nothing need be stopped."""

    def __init__(self, c: Any, appetite: Appetite) -> None:
        self._appetite = appetite
        self._channel = c.task_consumer.channel
        self._errors = c.connection_errors

        def may_consume() -> bool:
            self.is_shut = not appetite.room
            return self._has_asked or not (self.is_shut or self._has_enough)

        connections.limit_fetching(
            self._channel.qos, may=may_consume, room=lambda: self._room, beyond=lambda: appetite.beyond
        )

    @property
    def _room(self) -> int:
        """How many more messages may be fetched."""
        return self._appetite.room

    @property
    def _has_asked(self) -> bool:
        """Whether an answer of the broker is on its way: if nobody read it, nobody would have the message in it."""
        return False

    @property
    def _has_enough(self) -> bool:
        """Whether the next fetch waits until there is more to be fetched at once."""
        return False

    def is_beyond_limit(self, request: Any) -> bool:
        """Counts as Celery does: what was acknowledged early, or needs no acknowledgement, does not count."""
        qos = self._channel.qos
        if request.message.delivery_tag not in qos._delivered:
            return False
        return bool(0 < qos.prefetch_count < len(qos._delivered) - len(qos._dirty))

    def may_return(self, request: Any) -> bool:
        """It is fetched again only when there is room."""
        return True


class FromPostgres(FromChannel):
    """From Postgres. A fetch is one statement, and a message that is given back is in its place again."""

    def __init__(self, c: Any, appetite: Appetite) -> None:
        super().__init__(c, appetite)
        self._wake = c.connection.transport.wake
        appetite.tell = self._wake

    def adjust(self) -> None:
        """Have the channel ask again, if there is room that it does not know of."""
        if self.is_shut and self._appetite.room:
            self._wake()


class FromRedis(FromChannel):
    """From Redis, by kombu's transport or by ours."""

    def __init__(self, c: Any, appetite: Appetite) -> None:
        super().__init__(c, appetite)
        self._prefetches = not c.app.conf.get("worker_disable_prefetch")

    @property
    def _room(self) -> int:
        # Celery's own check knows only whether one more message may be fetched, and our transport fetches several.
        return self._appetite.room if self._prefetches else self._appetite.idle

    @property
    def _has_asked(self) -> bool:
        return bool(self._channel._in_poll)

    @property
    def _has_enough(self) -> bool:
        return hasattr(self._channel, "give_back") and is_busy()  # kombu's fetches one message at a time

    def in_order(self, waiting: list[Delivered]) -> list[Delivered]:
        """Each goes to the head of its list, so the first one goes last."""
        return waiting[::-1]

    def shut(self) -> None:
        """Read the answer to what kombu's transport has asked for already: it may be a message."""
        asked = getattr(self._channel, "_asked", None)
        if self._channel._in_poll and state.active_requests and (asked is None or asked.name == "FETCH"):
            with suppress(Empty, *self._errors):  # what is lost with its connection is found by the sweeper
                self._channel._brpop_read()


class FromRabbitMQ(Fetcher):
    """From RabbitMQ, which sends by itself: as many unacknowledged messages as the prefetch allows.

    It knows the order of what is given back, or puts it behind what was given back before (`docs/rabbitmq.md`).

    A job's message is acknowledged when its run begins. So when the pool is full the consumers are cancelled, before
    the acknowledgement that would bring the next message. Nobody waits for the answer, as a delivery is in progress.
    """

    def __init__(self, c: Any, appetite: Appetite) -> None:
        self._c = c
        self._appetite = appetite
        self._is_solo = isinstance(c.pool, Solo)
        self._consumer = c.task_consumer
        self._consume = connections.replace_consume(self._consumer, self._open)
        self._set_window = connections.replace_prefetch(c.qos, self._note_most)
        self._most = UNLIMITED
        self._note_most(prefetch_count=c.initial_prefetch_count)
        self._window = 0
        self._cancelled: list[str] = []
        if getattr(c.pool, "is_green", False):
            connections.call_before_waits(c.connection, self._adjust_and_tell, look_s=LOOK_S)

    def before(self, request: Any) -> None:
        """With solo what holds back the next message is this one, unless it is acknowledged before its run."""
        if self._is_solo and (isinstance(request, Delivered) or request.task.acks_late):
            return
        self.hold()

    def hold(self) -> None:
        """Cancel, if the pool is full."""
        if self._appetite.is_full:
            self._close()

    def adjust(self) -> None:
        """Consume what there is room for."""
        if self._appetite.is_full:
            self._close()
        elif self.is_shut:
            self._open()
        elif self._wanted() != self._window:
            self._close()  # a prefetch of one consumer, as quorum queues want it, is that of new ones
            self._open()

    def may_return(self, request: Any) -> bool:
        """Not what came by a queue that only this worker serves: there it would come back at once."""
        tag = request.message.delivery_info["consumer_tag"]
        return all(self._consumer._active_tags.get(queue.name) != tag for queue in self._temporary())

    def shut(self) -> None:
        """Cancel, and wait for an answer: what was sent before that is received, and goes back."""
        with suppress(*self._c.connection_errors):
            self._close()
            self._set_window(prefetch_count=1)

    def _note_most(self, *, prefetch_count: int) -> None:
        """Replaces telling RabbitMQ: Celery's prefetch is a limit to ours."""
        self._most = prefetch_count or UNLIMITED

    def _wanted(self) -> int:
        """Return how many unacknowledged messages this worker wants: what it holds anyway, and what it may begin."""
        c = self._c
        held = max(0, c.qos.value - c.initial_prefetch_count)  # until their time
        held += sum(not request.message.acknowledged for request in list(state.active_requests))
        held += sum(len(bucket.contents) for bucket in c.task_buckets.values() if bucket)  # for their rate limit
        concurrency, ahead = self._appetite.concurrency, self._appetite.ahead
        # In steps, so that RabbitMQ is not told at each look.
        room = -(-ahead // concurrency) * concurrency if ahead else 0
        return int(max(1, min(self._most, held + room + max(0, concurrency - len(state.active_requests)))))

    def _open(self) -> None:
        """Consume from all queues that are not consumed from; a queue that is gone breaks the connection."""
        if self._appetite.is_full:
            self.is_shut = True
            return
        with _breaking_if_gone():
            window = self._wanted()
            if window != self._window:
                self._set_window(prefetch_count=window)
                self._window = window
            self._consume()
        self.is_shut = False
        for tag in self._cancelled:  # the answer says that all that came by them has arrived
            self._consumer.channel.callbacks.pop(tag, None)
        self._cancelled.clear()

    def _close(self) -> None:
        """Cancel all consumers but those whose queue would go with its last one; only writes."""
        temporary = {queue.name for queue in self._temporary()}
        tags = self._consumer._active_tags
        for queue in [queue for queue in tags if queue not in temporary]:
            tag = tags.pop(queue)
            self._cancelled.append(tag)
            self._consumer.channel.basic_cancel(tag, nowait=True)
        self.is_shut = True

    def _temporary(self) -> list[Any]:
        return [
            queue
            for queue in self._consumer.queues
            if queue.auto_delete or queue.exclusive or queue.expires or "x-expires" in (queue.queue_arguments or {})
        ]

    def _adjust_and_tell(self) -> bool:
        self.adjust()
        return self.is_shut


@contextmanager
def _breaking_if_gone() -> Iterator[None]:
    try:
        yield
    except ChannelError as error:
        raise RecoverableConnectionError(f"RabbitMQ lets this worker consume no more: {error}") from error


def fetcher_of(c: Any, appetite: Appetite) -> Fetcher:
    """Return how a worker fetches over its connection; where kombu's transport has no means for that, Celery's way."""
    match c.connection.transport.driver_type:
        case "redis":
            return FromRedis(c, appetite)
        case "postgres":
            return FromPostgres(c, appetite)
        case "amqp":
            return FromRabbitMQ(c, appetite)
    return Fetcher()

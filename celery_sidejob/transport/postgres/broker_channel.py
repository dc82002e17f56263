"""kombu's channel on the tables of the broker; each of its duties is an object with a file of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from kombu.log import get_logger
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments

from ...model.printable import counted
from ...store.broker import consumers, messages
from ..decoding import Message, NotAMessageError
from ..quarantine import Quarantine
from . import broadcasts, rows
from .acknowledgements import Acknowledgements, QoS
from .dead import DeadList
from .fetching import AT_MOST, SPARE_S, Deliveries, Fetching, sort, times_back
from .link import BINDINGS, LOST, Link, Run, ring_of_exchange, ring_of_queue, ring_of_return

logger = get_logger(__name__)


class Channel(virtual.Channel):
    """A channel; its messages are held by the consumer of its connection."""

    QoS = QoS
    Message = Message
    DeadList = DeadList
    supports_fanout = True
    body_encoding = None
    exchange_types = {**virtual.Channel.exchange_types, "topic": broadcasts.TopicExchange}

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self.link: Link = connection.link
        """The connection over which statements run."""
        self.acknowledgements = Acknowledgements(connection, lambda: self.closed)
        self.fetching = Fetching(connection)
        self.deliveries = Deliveries(self, connection, self.acknowledgements)
        self._quarantine = Quarantine(limit=connection.delivery_limit, silence_s=connection.silence_s)
        self._acknowledged: set[str] = set()
        """The consumed queues whose messages are acknowledged."""
        self._pid = os.getpid()

    # -- sending ---------------------------------------------------------------------------------------------------

    def _next_delivery_tag(self) -> str:
        """Replaces a random id: a message has one when it is a row."""
        return ""

    def encode_body(self, body: Any, encoding: Any = None) -> tuple[Any, Any]:
        """Replaces base64 for all bodies: a text is stored as it is."""
        return rows.encoded(body)

    def _put(self, queue: str, message: Any, _publish_batch: rows.PublishBatch | None = None, **options: Any) -> None:
        row = rows.row_of(queue, message)
        if _publish_batch is not None:
            _publish_batch.add(row)
        else:
            rows.put(self.link, row)

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **options: Any) -> None:
        broadcasts.broadcast(self.link, exchange, message, routing_key)
        self.link.ring(ring_of_exchange(exchange))  # each time: nobody looks for broadcasts again soon

    def ring(self, queue: str) -> None:
        """Wake those who consume a queue, for what another transaction has put there."""
        self.link.ring_apart(ring_of_queue(queue))

    def create_publish_batch(self, max_size: int) -> rows.PublishBatch:
        """Return a batch for kombu's `Producer.batch`."""
        return rows.PublishBatch(self, max_size)

    # -- queues and bindings ---------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        """Replaces ignoring a queue's expiry."""
        return to_rabbitmq_queue_arguments(arguments, **options)

    def _new_queue(
        self, queue: str, auto_delete: bool = False, exclusive: bool = False, arguments: Any = None, **options: Any
    ) -> None:
        expires_ms = (arguments or {}).get("x-expires")
        self.connection.topology.declare(queue, transient=bool(auto_delete or exclusive), expires_ms=expires_ms)

    def _has_queue(self, queue: str, **options: Any) -> bool:
        return bool(self.connection.topology.is_declared(queue))

    def _size(self, queue: str) -> int:
        return self.link.run("read", lambda executor: messages.size(executor, queue))

    def _purge(self, queue: str) -> int:
        count = self.link.run("purge", lambda executor: messages.purge_later(executor, queue))
        while page := self.link.run("purge", lambda executor: messages.purge_page(executor, queue)):
            count += page
        return count

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **options: Any
    ) -> None:
        """Replaces a binding in this process alone; queues of a fanout exchange are not known to anybody."""
        exchange = exchange or "amq.direct"
        routing_key = routing_key or ""
        kind = self.typeof(exchange).type
        self.state.binding_declare(queue, exchange, routing_key, arguments)
        if kind != "fanout":
            self.connection.topology.bind(queue, exchange, routing_key)
        if kind == "fanout" or (kind == "topic" and self.connection.topology.is_transient(queue)):
            self.connection.broadcasts.listen(queue, exchange, None if kind == "fanout" else routing_key)
        if kind == "topic":
            self.link.ring(BINDINGS)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **options: Any
    ) -> None:
        """Replaces removing a binding of this process alone."""
        exchange = exchange or "amq.direct"
        routing_key = routing_key or ""
        self.state.binding_delete(queue, exchange, routing_key)
        self.connection.broadcasts.forget(queue, exchange)
        self.connection.topology.unbind(queue, exchange, routing_key)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **options: Any) -> None:
        """Replaces deleting what this process knows of: the queue goes with all bindings and messages."""
        if if_empty and self._size(queue):
            return
        self.connection.topology.delete(queue)
        if not self.connection.broadcasts.is_listening(queue):
            self._purge(queue)
        self.state.queue_bindings_delete(queue)
        self.connection.broadcasts.forget(queue)

    def get_table(self, exchange: str) -> list[tuple[str, Any, str]]:
        """Replaces the bindings of this process: they are everybody's."""
        bound = self.connection.topology.bound_to(exchange)
        return [(one.routing_key, None, one.queue) for one in bound]

    # -- consuming -------------------------------------------------------------------------------------------------

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **options: Any) -> Any:
        """Adds to kombu's: the connection has a heart from now on."""
        self.connection.start_heart()
        (self._acknowledged.discard if no_ack else self._acknowledged.add)(queue)
        result = super().basic_consume(queue, no_ack, *args, **options)
        self.connection.update_rings()
        self.fetching.look_at_all()
        return result

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Adds to kombu's: its queue is not listened to any more."""
        if self.closed and self.connection is None:  # gevent: a greenlet was stopped in the middle of its poll
            return None
        result = super().basic_cancel(consumer_tag)
        self.connection.update_rings()
        return result

    @property
    def fetched_queues(self) -> list[str]:
        """The consumed queues that have messages of their own."""
        return [queue for queue in self._active_queues if not self.connection.broadcasts.is_listening(queue)]

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Replaces kombu's, which knows of no message that is taken without being acknowledged."""
        while True:
            found = (
                self.fetching.take([queue], 1, whole=True)
                if no_ack
                else self.fetching.fetch_one(queue, self.acknowledgements)
            )
            if not found:
                return None
            row = found[0]
            try:
                payload = self.deliveries.payload_of(row)
                if payload is None:
                    self.acknowledgements.done.append(row.id)
                    continue
                message = self.Message(payload, channel=self)
            except NotAMessageError as error:
                self.deliveries.give_up_unreadable(row, error)
                continue
            if not no_ack:
                self.qos.append(message, message.delivery_tag)
            return message

    def poll(self) -> bool:
        """Do what is to be done now; tell whether a message was delivered."""
        delivered = False
        fetching = self.fetching
        self._release(self.link.run)
        room = 0 if self._quarantine.is_on(self.qos) else fetching.room(self.qos)
        to_fetch = [queue for queue in self.fetched_queues if queue in self._acknowledged]
        fetching.next_at = inf
        if to_fetch and room and fetching.is_worth_it(room, self.acknowledgements, self.qos):
            found = fetching.fetch(to_fetch, room, self.acknowledgements)
            self._rotate(to_fetch, found)
            delivered = self.deliveries.deliver(self._without_suspects(found))
        elif self.acknowledgements.done.are_late():
            self.flush()
        if self._quarantine.until is not None:
            fetching.next_at = self._quarantine.until
        if fetching.spare is not None and not room:  # nobody tells of a task that was acknowledged early and has ended
            fetching.next_at = monotonic() + SPARE_S
        to_take = [queue for queue in self.fetched_queues if queue not in self._acknowledged]
        if to_take:
            found = fetching.take(to_take, AT_MOST if self.connection.has_loop else 1)
            self._rotate(to_take, found)
            delivered |= self.deliveries.deliver(found)
        return delivered

    def _rotate(self, queues: Sequence[str], found: Sequence[Any]) -> None:
        """Have the next queue begin the next fetch."""
        if len(queues) > 1 and found:
            last = found[-1].queue
            self._active_queues.append(self._active_queues.pop(self._active_queues.index(last)))

    def _without_suspects(self, found: Sequence[Any]) -> Sequence[Any]:
        """Return what is to be delivered now: all, or a message alone whose worker has died with it.

        If we die before a message is given up, whoever fetches it next gives it up.
        """
        doomed, delivered, released = sort(found, self._quarantine)
        for row in doomed:
            self.deliveries.bury(
                row,
                f"it came back {counted(times_back(row), 'time', 'times')} after it had begun: its worker died or gave "
                "it up",
            )
        self.deliveries.return_undelivered(released)
        self._release(self.link.run)
        return delivered

    # -- ends of messages ------------------------------------------------------------------------------------------

    def give_back(self, delivery_tag: Any) -> None:
        """Have a message given back soon that was not begun: it counts as never delivered."""
        self.acknowledgements.give_back(delivery_tag, begun=False)
        virtual.QoS.ack(self.qos, delivery_tag)

    @property
    def is_busy(self) -> bool:
        """Whether it hands messages over just now, or has ends of messages to carry out."""
        return bool(self.deliveries.are_under_way or self.acknowledgements.done or self.acknowledgements.back)

    @property
    def next_at(self) -> float:
        """When this channel has something to do that it puts off."""
        return min(self.fetching.next_at, self.acknowledgements.next_at)

    def flush(self) -> None:
        """Remove what was acknowledged."""
        self.acknowledgements.remove(self.link.run)

    def end_late(self, late_s: float, run: Run) -> None:
        """Carry out over another connection, in another thread, what was reported so long ago."""
        if self.acknowledgements.done.are_late(late_s):
            self.acknowledgements.remove(run)
        if self.acknowledgements.back.are_late(late_s):
            self._release(run)

    def _release(self, run: Run) -> None:
        """Release what was given back, and tell those who may fetch it."""
        if not self.acknowledgements.release(run):
            return
        self.fetching.look_at_all()
        channel, rings = self.link.channel, [ring_of_return(queue) for queue in self.fetched_queues]
        for ring in rings:
            run("ring", partial(consumers.notify, channel=channel, payload=ring))

    # -- its end ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give back all messages of this channel, in one statement."""
        if self._pid != os.getpid():
            return  # a forked copy holds nothing
        try:
            self.flush()
            self.qos._flush()
            self.acknowledgements.back.extend(self.qos.unacknowledged_rows)
            self._release(self.link.run)
        except LOST as error:
            logger.warning(
                "%d messages could not be given back; others get them soon: %s", len(self.acknowledgements.back), error
            )

    def close(self) -> None:
        """Adds to kombu's: what was acknowledged is removed."""
        if not self.closed and self._pid == os.getpid() and self.acknowledgements.done:
            try:
                self.flush()
            except LOST as error:
                logger.warning(
                    "%d acknowledged messages were not removed, and come again: %s",
                    len(self.acknowledgements.done),
                    error,
                )
        super().close()

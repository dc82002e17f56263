"""kombu's channel on the tables of the broker: sends, fetches in turns, and reads broadcasts.

A *turn* is one statement: it removes what was acknowledged since the last one, and takes the next messages. Each
(queue, priority) has a lower bound, the id behind the last one taken: Postgres then does not step over rows that were
removed and not vacuumed. What lies below it is looked for about once a second: messages that came back, and those of
senders that committed late.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from threading import get_ident
from time import monotonic
from typing import Any

from kombu.log import get_logger
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual import exchange as exchanges

from ...store.broker import broadcasts, consumers, dead, messages, queues
from ...store.broker.messages import HIGHEST_PRIORITY, Place
from ..announcements import message_buried, message_refused
from ..begun import is_counted_by_a_row
from ..decoding import Message, NotAMessageError, made
from . import bell, rows
from .batch import PublishBatch
from .dead import DeadList, headers_of, task_id_of
from .link import LOST, Link, Run
from .qos import QoS

logger = get_logger(__name__)

AT_MOST = 64
"""The most messages that one turn takes."""
SOON_S = 0.005
"""How long an acknowledgement waits for a fetch that it can go with."""
SPARE_S = 0.01
"""How often a worker that prefetches nothing is asked whether it can begin another task."""
WHOLE_S = 1.0
"""How long a turn looks only behind the lower bounds."""
WHOLE_SHARE = 20
"""A look from the beginning comes again after this many times as long as it took: it takes a twentieth of the time."""
UNUSED_S = 3600.0
"""How long a transient queue without an expiry of its own is kept when nobody uses it."""
TRANSIENT = 1
"""The delivery mode of a message that need not survive a restart."""


class TopicExchange(exchanges.TopicExchange):
    """A topic exchange that tells transient queues by one broadcast, however many they are."""

    def deliver(self, message: Any, exchange: str, routing_key: str, **options: Any) -> None:
        """Replaces one message for each queue."""
        self.channel.put_by_topic(message, exchange, routing_key, self._match, **options)


class Channel(virtual.Channel):
    """A channel; its messages are held by the consumer of its connection."""

    QoS = QoS
    Message = Message
    DeadList = DeadList
    supports_fanout = True
    body_encoding = None
    exchange_types = {**virtual.Channel.exchange_types, "topic": TopicExchange}

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self.hungry = False
        """Whether there may be messages that this channel has not looked for."""
        self.spare: Callable[[], int] | None = None
        """How many more messages the worker can begin, if it is to be given no others."""
        self._unacknowledged: set[str] = set()
        """The consumed queues whose messages are acknowledged."""
        self._done: deque[int] = deque()
        self._done_at = 0.0
        self._references: set[int] = set()
        """The references among the messages that are not acknowledged."""
        self._back: deque[int] = deque()
        self._back_at = 0.0
        self._rejected: set[int] = set()
        """Those of them that were begun, and sent back by whoever had begun them."""
        self._alone: tuple[int, float] | None = None
        """A message beside which nothing is fetched, and until when."""
        self._lows: dict[tuple[str, int], int] = {}
        self._whole_at = 0.0
        self._fetched_at = 0.0
        self._fetch_at = inf
        self._delivering_in: int | None = None
        self._pid = os.getpid()

    @property
    def link(self) -> Link:
        """The connection over which statements run."""
        link: Link = self.connection.link
        return link

    # -- sending ---------------------------------------------------------------------------------------------------

    def _next_delivery_tag(self) -> str:
        """Replaces a random id: a message has one when it is a row."""
        return ""

    def encode_body(self, body: Any, encoding: Any = None) -> tuple[Any, Any]:
        """Replaces base64 for all bodies: a text is stored as it is."""
        return rows.encoded(body)

    def _put(self, queue: str, message: Any, _publish_batch: PublishBatch | None = None, **options: Any) -> None:
        row = rows.row_of(queue, message)
        if _publish_batch is not None:
            _publish_batch.add(row)
            return
        self.link.run("put", lambda executor: messages.put(executor, row))
        # If we die here, consumers find the message at their next look.
        bell.ring(self.link, bell.of_queue(queue))

    def ring(self, queue: str) -> None:
        """Wake those who consume a queue, for what another transaction has put there."""
        bell.ring(self.link, bell.of_queue(queue))

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **options: Any) -> None:
        self._broadcast(exchange, message, routing_key)
        self.link.ring(bell.of_exchange(exchange))  # each time: nobody looks for broadcasts again soon

    def _broadcast(self, exchange: str, message: Any, routing_key: str) -> None:
        headers, properties = rows.as_json(message["headers"]), rows.stored(message, message["properties"])
        self.link.run(
            "broadcast",
            lambda executor: broadcasts.send(
                executor, exchange, routing_key or "", headers, properties, message["body"]
            ),
        )

    def put_by_topic(
        self, message: Any, exchange: str, routing_key: str, matches: Callable[[Any, str], Any], **options: Any
    ) -> None:
        """Send a message to the queues whose patterns match: to each durable one, and once to all transient ones."""
        is_transient = message["properties"].get("delivery_mode") == TRANSIENT
        bound = self.connection.bindings.of(exchange, self.link, may_be_old=is_transient)
        found = [one for one in bound if matches(self._pattern(exchange, one.routing_key), routing_key)]
        for queue in dict.fromkeys(one.queue for one in found if not one.transient):
            self._put(queue, message, **options)
        if any(one.transient for one in found):
            self._broadcast(exchange, message, routing_key)
            bell.ring(self.link, bell.of_events(exchange), apart_s=bell.EVENTS_S / 2)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """Return a batch for kombu's `Producer.batch`."""
        return PublishBatch(self, max_size)

    # -- queues and bindings ---------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        """Replaces ignoring a queue's expiry."""
        return to_rabbitmq_queue_arguments(arguments, **options)

    def _new_queue(
        self, queue: str, auto_delete: bool = False, exclusive: bool = False, arguments: Any = None, **options: Any
    ) -> None:
        transient = bool(auto_delete or exclusive)
        expires_ms = (arguments or {}).get("x-expires")
        unused_s = expires_ms / 1000 if expires_ms is not None else UNUSED_S if transient else None
        # A message that is routed by a binding that a crash has undone would reach nobody.
        self.link.run_lastingly(
            "declare", lambda executor: queues.declare(executor, queue, transient=transient, unused_s=unused_s)
        )
        self.connection.expires[queue] = unused_s
        self.connection.transient[queue] = transient

    def _has_queue(self, queue: str, **options: Any) -> bool:
        return self.link.run("read", lambda executor: queues.is_declared(executor, queue))

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
            self.link.run_lastingly("bind", lambda executor: queues.bind(executor, exchange, queue, routing_key))
        if kind == "fanout" or (kind == "topic" and self.connection.transient.get(queue)):
            pattern = None if kind == "fanout" else self._pattern(exchange, routing_key)
            self.connection.listen(queue, exchange, pattern)
        if kind == "topic":
            self.link.ring(bell.BINDINGS)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **options: Any
    ) -> None:
        """Replaces removing a binding of this process alone."""
        exchange = exchange or "amq.direct"
        routing_key = routing_key or ""
        self.state.binding_delete(queue, exchange, routing_key)
        self.connection.listen_no_more(queue, exchange)
        self.link.run("unbind", lambda executor: queues.unbind(executor, exchange, queue, routing_key))

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **options: Any) -> None:
        """Replaces deleting what this process knows of: the queue goes with all bindings and messages."""
        if if_empty and self._size(queue):
            return
        self.link.run("delete", lambda executor: queues.delete(executor, queue))
        if queue not in self.connection.listening:
            self._purge(queue)
        self.state.queue_bindings_delete(queue)
        self.connection.listen_no_more(queue)
        self.connection.expires.pop(queue, None)

    def get_table(self, exchange: str) -> list[tuple[str, Any, str]]:
        """Replaces the bindings of this process: they are everybody's."""
        bound = self.connection.bindings.of(exchange, self.link)
        return [(one.routing_key, self._pattern(exchange, one.routing_key), one.queue) for one in bound]

    def _pattern(self, exchange: str, routing_key: str) -> Any:
        return self.typeof(exchange).prepare_bind("", exchange, routing_key, None)[1]

    # -- consuming -------------------------------------------------------------------------------------------------

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **options: Any) -> Any:
        """Adds to kombu's: the connection has a heart from now on."""
        self.connection.beat()
        (self._unacknowledged.discard if no_ack else self._unacknowledged.add)(queue)
        result = super().basic_consume(queue, no_ack, *args, **options)
        self.connection.mind_consumed()
        self.look_at_all()
        return result

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Adds to kombu's: its queue is not listened to any more."""
        if self.closed and self.connection is None:  # gevent: a greenlet was stopped in the middle of its turn
            return None
        result = super().basic_cancel(consumer_tag)
        self.connection.mind_consumed()
        return result

    @property
    def fetched_queues(self) -> list[str]:
        """The consumed queues that have messages of their own."""
        return [queue for queue in self._active_queues if queue not in self.connection.listening]

    @property
    def consumed_queues(self) -> list[str]:
        """All consumed queues."""
        return list(self._active_queues)

    def look_at_all(self) -> None:
        """Have the next turn look from the beginning of each queue."""
        self.hungry = True
        self._whole_at = 0.0

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Replaces kombu's, which knows of no message that is taken without being acknowledged."""
        while found := self._fetch([queue], 1, no_ack=no_ack, whole=True):
            row = found[0]
            try:
                payload = self.payload_of(row)
                message = None if payload is None else self.Message(payload, channel=self)
            except NotAMessageError as error:
                self._refuse_unreadable(row, error)
                continue
            if message is None:
                self._done.append(row.id)
                continue
            if not no_ack:
                self.qos.append(message, message.delivery_tag)
            return message
        return None

    def turn(self) -> bool:
        """Do what is to be done now; tell whether a message was delivered."""
        delivered = False
        if self._back:
            self._give_back()
        room = self._room()
        to_fetch = [queue for queue in self.fetched_queues if queue in self._unacknowledged]
        self._fetch_at = inf
        if to_fetch and room and (self._may_fetch(room) if self.hungry else self._is_late(SOON_S)):
            self.hungry = False
            found = self._fetch(to_fetch, room)
            self._fetched_at = monotonic()
            self.hungry = len(found) >= room
            delivered = self._deliver(self._mind_deaths(found))
        elif self._is_late(SOON_S):
            self.flush()
        if self._alone is not None:
            self._fetch_at = self._alone[1]
        if self.spare is not None and not room:  # nobody tells of a task that was acknowledged early and has ended
            self._fetch_at = monotonic() + SPARE_S
        to_take = [queue for queue in self.fetched_queues if queue not in self._unacknowledged]
        if to_take:
            delivered |= self._deliver(
                self._fetch(to_take, 1 if not self.connection.has_loop else AT_MOST, no_ack=True)
            )
        return delivered

    def _room(self) -> int:
        """Return how many messages this channel may be given."""
        if not self.qos.can_consume() or self._is_alone():
            return 0
        free: int | None = self.qos.can_consume_max_estimate()
        if free is None:
            free = AT_MOST if self.connection.has_loop else 1
        if self.spare is not None:
            free = max(0, min(free, self.spare()))
        return min(free, AT_MOST)

    def _may_fetch(self, room: int) -> bool:
        """Tell whether it is worth a statement now: half of the room is free, or it is a while since the last one.

        In a drain the acknowledgements of several messages thereby go with one fetch; and no process of a pool
        waits for longer than `SOON_S` because others are busy.
        """
        if 2 * room >= min(room + len(self.qos._delivered), AT_MOST):
            return True
        self._fetch_at = self._fetched_at + SOON_S
        return monotonic() >= self._fetch_at

    def _fetch(self, names: Sequence[str], room: int, *, no_ack: bool = False, whole: bool = False) -> Sequence[Any]:
        began = monotonic()
        whole = whole or began >= self._whole_at
        places = [
            Place(queue, priority, 0 if whole else self._lows.get((queue, priority), 0))
            for priority in range(HIGHEST_PRIORITY, -1, -1)
            for queue in names
        ]
        if no_ack:
            reads = self.connection.compose is not None
            found = self.link.run(
                "take", lambda executor: messages.take(executor, places=places, room=room, reads=reads)
            )
        else:
            found = self._turn(places, room)
        for row in found:
            self._lows[row.queue, row.priority] = row.id + 1
        if whole:
            now = monotonic()
            self._whole_at = now + max(WHOLE_S, WHOLE_SHARE * (now - began))
        if len(names) > 1 and found:  # the next queue has its turn
            last = found[-1].queue
            self._active_queues.append(self._active_queues.pop(self._active_queues.index(last)))
        return found

    def _turn(self, places: Sequence[Place], room: int) -> Sequence[Any]:
        self.connection.beat()
        holder, done = self.connection.consumer, self._take_done()
        reads = self.connection.compose is not None
        try:
            found = self.link.run(
                "turn",
                lambda executor: messages.turn(
                    executor, holder=holder, done=done, places=places, room=room, reads=reads
                ),
            )
        except BaseException:
            self._done.extendleft(reversed(done))
            raise
        self._refuse(found.refused, "ack")
        self.connection.mind_turn(found)
        return found.rows

    # -- messages whose workers died ---------------------------------------------------------------------------------

    def _mind_deaths(self, found: Sequence[Any]) -> Sequence[Any]:
        """Return what is to be delivered now: all, or a message alone whose worker has died with it.

        So the next death is charged to that one only. One that came back as often as it may is given up; if we die
        before that, whoever takes it next gives it up. The row that a reference leads to has a limit of its own.
        """
        doomed = {row.id for row in found if self._came_back(row) >= self.connection.delivery_limit}
        for row in found:
            if row.id in doomed:
                self._bury(
                    row,
                    f"it came back {self._came_back(row)} times after it had begun: its worker died or gave it up",
                )
        found = [row for row in found if row.id not in doomed]
        place = next((place for place, row in enumerate(found) if row.deaths and row.task_id is None), None)
        if place is None:
            return found
        if not place:
            is_grave = 2 * self._came_back(found[0]) >= self.connection.delivery_limit
            self._alone = found[0].id, inf if is_grave else monotonic() + self.connection.silence_s
        kept = found[: max(1, place)]
        self._back.extend(row.id for row in found[len(kept) :])
        self._give_back()
        return kept

    def _came_back(self, row: Any) -> int:
        """Return how often a message came back as the delivery limit counts: where a row counts, by deaths alone."""
        if not row.returns or row.task_id is not None:
            return 0
        return int(row.deaths if is_counted_by_a_row(headers_of(row.headers)) else row.returns)

    def _refuse_unreadable(self, row: Any, error: NotAMessageError) -> None:
        """Give up what is no message; of a reference, its row is left to the sweeper."""
        if row.task_id is not None:
            self._done.append(row.id)
        elif self._bury(row, error.reason):
            return
        logger.error("Queue %r had %.200r: %s", row.queue, row.task_id or row.body, error.reason)

    def _bury(self, row: Any, reason: str) -> bool:
        """Put a message into the dead list; False if this consumer does not hold it."""
        holder = self.connection.consumer
        buried = self.link.run("bury", lambda executor: dead.bury(executor, holder=holder, ids=[row.id], reason=reason))
        for one in buried:
            task_id = task_id_of(one.headers)
            logger.error("A message of queue %r (task %s) is dead: %s", one.queue, task_id, reason)
            message_buried.send(queue=one.queue, task_id=task_id, reason=reason)
        return bool(buried)

    def _is_alone(self) -> bool:
        """Tell whether a message whose worker died is kept alone, so that nothing may be fetched now."""
        if self._alone is None:
            return False
        tag, until = self._alone
        if tag in self.qos._delivered and tag not in self.qos._dirty and monotonic() < until:
            return True
        self._alone = None
        return False

    def _deliver(self, found: Sequence[Any]) -> bool:
        """Deliver messages in their order; those that cannot be delivered go back to their places."""
        left = deque(found)
        self._delivering_in = get_ident()
        try:
            while left:
                self.connection.check_alive()  # with solo, each message before this one was run here
                row = left[0]
                callback = self.connection._callbacks.get(row.queue)
                if callback is None:  # it was cancelled meanwhile
                    self._back.append(row.id)
                else:
                    try:
                        self._hand_over(row, callback)
                    except NotAMessageError as error:  # it would end each worker that is given it
                        self._refuse_unreadable(row, error)
                left.popleft()
        finally:
            self._delivering_in = None
            self._back.extend(row.id for row in left if row.id not in self.qos._delivered)
        return bool(found)

    def _hand_over(self, row: Any, callback: Callable[[Any], Any]) -> None:
        payload = self.payload_of(row)
        if payload is None:
            self._done.append(row.id)
            return
        if row.task_id is not None:
            self._references.add(row.id)
        callback(payload)

    def payload_of(self, row: Any) -> dict[str, Any] | None:
        """Return kombu's message; None for a reference that leads to nothing any more. May raise NotAMessageError."""
        payload = (
            self.connection.compose(row) if row.task_id is not None else made(partial(rows.payload_of, row, row.id))
        )
        return None if payload is None else rows.returned(payload, row.returns)

    # -- ends of messages: any thread may report them ----------------------------------------------------------------

    def note_done(self, delivery_tag: Any, verb: str) -> None:
        """Have a message's row removed soon."""
        is_reference = delivery_tag in self._references
        self._references.discard(delivery_tag)
        if self.closed or self._pid != os.getpid():
            if not is_reference:  # what a reference led to was ended by a commit: its next delivery finds nothing
                self._refuse([delivery_tag], verb)
            return
        if not self._done:
            self._done_at = monotonic()
        self._done.append(delivery_tag)
        self.connection.wake()

    def note_back(self, delivery_tag: Any) -> None:
        """Have a message given back soon, which was begun."""
        self._rejected.add(delivery_tag)
        self._note_back(delivery_tag)

    def give_back(self, delivery_tag: Any) -> None:
        """Have a message given back soon that was not begun: it counts as never delivered."""
        self._note_back(delivery_tag)
        virtual.QoS.ack(self.qos, delivery_tag)

    def _note_back(self, delivery_tag: Any) -> None:
        if self.closed or self._pid != os.getpid():
            self._refuse([delivery_tag], "requeue")
            return
        if not self._back:
            self._back_at = monotonic()
        self._references.discard(delivery_tag)
        self._back.append(delivery_tag)
        self.connection.wake()

    def _is_late(self, after_s: float) -> bool:
        return bool(self._done) and monotonic() - self._done_at >= after_s

    @property
    def delivers(self) -> bool:
        """Whether it hands messages over just now, which may take long where that runs them (the pool solo)."""
        return self._delivering_in is not None

    @property
    def next_at(self) -> float:
        """When this channel has something to do that it puts off."""
        return min(self._fetch_at, self._done_at + SOON_S if self._done else inf)

    @property
    def has_ends(self) -> bool:
        """Whether ends of messages were reported and not carried out yet."""
        return bool(self._done or self._back)

    def flush(self) -> None:
        """Remove what was acknowledged."""
        self._flush_by(self.link.run)

    def end_late(self, late_s: float, run: Run) -> None:
        """Carry out over another connection, in another thread, what was reported so long ago."""
        if self._is_late(late_s):
            self._flush_by(run)
        if self._back and monotonic() - self._back_at >= late_s:
            self._give_back_by(run)

    def _flush_by(self, run: Run) -> None:
        done = self._take_done()
        if not done:
            return
        holder = self.connection.consumer
        try:
            refused = run("remove", lambda executor: messages.remove(executor, holder=holder, done=done))
        except BaseException:
            self._done.extendleft(reversed(done))
            raise
        self._refuse(refused, "ack")

    def _take_done(self) -> list[int]:
        return list(_emptied(self._done))

    def _give_back(self) -> None:
        self._give_back_by(self.link.run)

    def _give_back_by(self, run: Run) -> None:
        back = list(_emptied(self._back))
        if not back:
            return
        begun = [one for one in back if one in self._rejected]
        holder = self.connection.consumer
        try:
            refused = run("release", lambda executor: messages.release(executor, holder=holder, ids=back, begun=begun))
        except BaseException:
            self._back.extendleft(reversed(back))
            raise
        self._rejected.difference_update(begun)
        self._refuse(refused, "requeue")
        self.look_at_all()
        channel, rings = self.link.channel, [bell.of_return(queue) for queue in self.fetched_queues]
        for ring in rings:
            run("ring", partial(consumers.notify, channel=channel, payload=ring))

    def _refuse(self, delivery_tags: Any, verb: str) -> None:
        for delivery_tag in delivery_tags:
            logger.warning(
                "Cannot %s message %s: this consumer was declared dead or has lost its connection, and the message has "
                "gone to another one", verb, delivery_tag,
            )  # fmt: skip
            message_refused.send(
                verb=verb, consumer=str(self.connection and self.connection.consumer), delivery_tag=str(delivery_tag)
            )

    # -- its end ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give back all messages of this channel, in one statement."""
        if self._pid != os.getpid():
            return  # a forked copy holds nothing
        try:
            self.flush()
            self.qos._flush()
            self._back.extend(self.qos.unacknowledged_rows)
            if self._back:
                self._give_back()
        except LOST as error:
            logger.warning("%d messages could not be given back; others get them soon: %s", len(self._back), error)

    def close(self) -> None:
        """Adds to kombu's: what was acknowledged is removed."""
        if not self.closed and self._pid == os.getpid() and self._done:
            try:
                self.flush()
            except LOST as error:
                logger.warning("%d acknowledged messages were not removed, and come again: %s", len(self._done), error)
        super().close()


def _emptied(ends: deque[int]) -> Iterator[int]:
    """Yield and remove what is in there, whichever thread adds more meanwhile."""
    while True:
        try:
            yield ends.popleft()
        except IndexError:
            return

"""kombu's Redis channel, with a fetch that cannot lose a message: one script takes and records it.

Fetching has two steps on the connection that kombu polls. A *fetch* takes the messages for this consumer, and
is answered at once. If it finds none, the channel *waits* for the bell of one of its queues. Our own publishers ring
it; for publishers with kombu's transport this process' heart does. The blocking wait is for a bell and never for a
message, so an unread answer loses nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport import redis, virtual
from kombu.utils.json import dumps
from redis import Redis
from redis.exceptions import NoScriptError

from .. import tell_refused
from ..decoding import Message
from ..options import DEFAULTS, SHARED
from ..quarantine import Quarantine
from ..topics import TopicExchange
from .acknowledgements import Acknowledgements, QoS
from .connections import WITHOUT_NOTICES, Line, breaking, has_come, unless_full
from .consumer import Consumer
from .dead import DeadList
from .fetching import Fetch, Fetching, deliver, message_of
from .records import BELL_MS, Records, parted
from .scripts import PUT, Keys

RECORD_BINDINGS_EVERY_S = 1.0
"""Seconds between two tries of a channel to record its bindings on a full server."""
GOODBYE_S = 1.0
"""Seconds that a closing channel waits for the answer to its last fetch."""


class Asked(enum.Enum):
    """The command on the connection polled by kombu whose answer is outstanding."""

    FETCH = enum.auto()
    WAIT = enum.auto()


class Channel(redis.Channel):
    """A channel that fetches reliably; its lists are those of kombu's own transport, whose workers may share them.

    Each channel is a consumer. After a lost answer to a fetch it becomes another consumer, and the messages of that
    answer are given back.
    """

    QoS = QoS
    Message = Message
    DeadList = DeadList
    exchange_types = {**redis.Channel.exchange_types, "topic": TopicExchange}
    from_transport_options = (*redis.Channel.from_transport_options, *SHARED)
    consumer_timeout = 3.5
    """Seconds of silence after which a consumer counts as dead."""
    loop_timeout: float | None = DEFAULTS["loop_timeout"]
    """Seconds for which the consuming thread may stand still before other workers get its messages; None for any time.
    """
    delivery_limit: int | None = DEFAULTS["delivery_limit"]
    """How often a message that had begun may come back before it goes to the dead list; None for any number."""
    dead_list_limit: int | None = DEFAULTS["dead_list_limit"]
    dead_list_days: float | None = DEFAULTS["dead_list_days"]
    """How many messages the dead list keeps, and for how long; None for any number, and for ever."""

    _kept_client: Any = None
    _plain_client: Any = None
    _asked: Asked | None = None
    _polled: Fetch | None = None
    _record_bindings_at = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        """Adds to kombu's: each duty of a channel is an object with its own file."""
        self._unrecorded_bindings: list[tuple[str, ...]] = []
        super().__init__(*args, **options)
        self.quarantine = Quarantine(limit=self.delivery_limit, silence_s=self.consumer_timeout)
        self.consumer = Consumer(self)
        self._fetching = Fetching(self)

    # -- the path of a message -------------------------------------------------------------------------------------

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """Replaces kombu's push: pushes to the same list, and rings the queue's bell in the same step."""
        name = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
        expires_ms = self._expires.get(queue)
        expiring = [] if expires_ms is None else self._lists_of(queue)
        keys = [self.keys.kombu_list(name), self.keys.bell(queue), *expiring]
        arguments = [BELL_MS, expires_ms or 0, dumps(message)]
        batch = options.pop("_publish_batch", None)
        if batch is None:
            self._line.run(PUT, keys, arguments, client=self._client_of_scripts)
            return
        # Load the script first: it cannot be sent again in the middle of a batch.
        batch.pipeline.scripts.add(self._put_of_batches)
        # kombu's client puts the prefix before the first key of a script, and before no other.
        batch.add("evalsha", PUT.sha, len(keys), name, *keys[1:], *arguments)

    def _queue_bind(self, *binding: str) -> None:
        """Adds to kombu's: bindings that a full server refuses are recorded once it has room."""
        self._unrecorded_bindings.append(binding)
        with unless_full():
            super()._queue_bind(*binding)
            self._unrecorded_bindings.remove(binding)

    def get_table(self, exchange: str) -> Any:
        """Adds to kombu's: the bindings of this channel belong to it."""
        self._record_bindings()
        return super().get_table(exchange)

    def _record_bindings(self) -> None:
        self._record_bindings_at = monotonic() + RECORD_BINDINGS_EVERY_S
        bindings, self._unrecorded_bindings = self._unrecorded_bindings, []
        for binding in bindings:
            self._queue_bind(*binding)

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any) -> Any:
        """Adds to kombu's: without acknowledgements nothing is recorded; a new queue needs no old bell."""
        unrecorded = self._fetching.unrecorded
        (unrecorded.add if no_ack or not self.ack_emulation else unrecorded.discard)(queue)
        result = super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        self._fetching.is_idle = False
        if self._asked is Asked.WAIT and self._in_poll:
            self._in_poll.disconnect()  # only a bell can be missed
        return result

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Replaces kombu's pop and later record, if an acknowledgement is expected."""
        if no_ack or not self.ack_emulation:
            return super().basic_get(queue, no_ack=no_ack, **options)
        self.consumer.give_back_unheard()
        with self.renewing_if_struck():
            taken = self._fetching.fetch_now(queue)
            self._maybe_update_queues_expire(self._create_client(), queue)
            message = message_of(self, taken)
            if message is not None:
                self.qos.append(message, message.delivery_tag)
        return message

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Replaces kombu's blocking pop: fetches, or waits for a bell if the last fetch found nothing."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        if self._asked is Asked.FETCH:  # its connection broke without an answer
            self._renew()
        if self._unrecorded_bindings and monotonic() >= self._record_bindings_at:
            self._record_bindings()
        self.consumer.give_back_unheard()
        if self._fetching.is_idle:
            asked = Asked.WAIT
            command = ["BRPOP", *self.keys.bells(queues), (self.brpop_timeout if timeout is None else timeout) or 0]
        else:
            asked = Asked.FETCH
            self._polled, command = self._fetching.ask(self._fetching.page_of(queues), self._fetching.room)
        connection = self.client.connection
        try:
            self._asked = asked
            self._in_poll = connection
            self._brpop_sent_at = monotonic()
            connection.send_command(*command)
        except BaseException:  # at a time limit: a command that was not sent gets no answer
            connection.disconnect()
            self._in_poll = None
            raise

    def _brpop_read(self, **options: Any) -> bool:
        """Replaces reading one message: delivers all messages of a fetch, or fetches next after a bell."""
        asked = self._asked
        answer = self._read_answer()
        self._fetching.is_idle = False
        if asked is not Asked.FETCH:
            self._asked = None
            raise Empty
        with self.renewing_if_struck():  # until here it counts as unanswered, with the same effect
            self._asked = None
            assert self._polled is not None
            taken = self._fetching.taken(self._polled, answer)
            self._fetching.turn_page(bool(taken))
            # Not right after the delivery: Celery delays acknowledgements until its loop has gone round once.
            last = next(reversed(self.qos._delivered), None)
            self._fetching.is_buffered = last is not None and last not in self.qos._dirty
            for one in taken:
                self._queue_cycle.rotate(one.queue)
        if not deliver(self, taken):
            raise Empty
        return True

    def _read_answer(self) -> Any:
        """Read Redis' answer; raises Empty if none has arrived, because all other work waits for this thread."""
        connection = self.client.connection
        if not has_come(connection):
            raise Empty
        try:
            with self.connection.pulse.reading():
                return connection.read_response()
        except NoScriptError:  # the server was restarted, or a failover has replaced it
            self._asked, self._fetching.knows_scripts = None, False
            raise Empty from None
        except self.connection_errors:
            connection.disconnect()
            raise
        except self.ResponseError:
            self._asked = None
            raise
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()

    def _receive(self) -> bool:
        """Adds to kombu's: if nothing has arrived, nothing is read."""
        if not has_come(self.subclient.connection):
            raise Empty
        return bool(super()._receive())

    def finish(self, delivery_tag: str, verb: str) -> None:
        """Forget a finished message, if this consumer still has it; otherwise announce that it has not."""
        consumer, token = parted(delivery_tag)
        if not consumer:
            return
        if self.closed:  # closing it gave back everything
            self.refuse(delivery_tag, verb)
        elif self.connection.has_loop:
            self.acknowledgements.write(delivery_tag, verb)
        elif not self.records.acknowledge(consumer, token):
            self.refuse(delivery_tag, verb)

    def send_back(self, delivery_tag: str) -> None:
        """Give a message that had begun back to the head of its list, behind those that came back before.

        This counts: a message that came back too often goes to the dead list. Announces a message that is no longer
        ours.
        """
        consumer, token = parted(delivery_tag)
        if consumer and (self.closed or not self.records.send_back(consumer, token)):
            self.refuse(delivery_tag, "requeue")

    def give_back(self, delivery_tag: str) -> None:
        """Give a message that has not begun back to its list's head, without counting; announces one no longer ours."""
        consumer, token = parted(delivery_tag)
        if consumer and (self.closed or not self.records.give_back(consumer, [token])):
            self.refuse(delivery_tag, "requeue")
        virtual.QoS.ack(self.qos, delivery_tag)

    # -- its end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Replaces kombu's wait for the blocking pop, which may take long; gives all messages of this channel back."""
        if not self.closed:
            self._hang_up()
            self.leave()
        super().close()
        self._line.close()
        self._disconnect_pools()

    def leave(self) -> None:
        """Give back all messages of this channel, in their order, and stop being a consumer."""
        self._fetching.is_idle = False
        self.consumer.leave()

    def _hang_up(self) -> None:
        """Drop the polled connection; a message that a fetch takes at this moment is in the record, and goes back."""
        connection = self._in_poll
        if not connection:
            return
        try:
            if self._asked is Asked.FETCH and connection.can_read(timeout=GOODBYE_S):
                connection.read_response()
        except (*self.connection_errors, self.ResponseError):
            pass  # no answer: if Redis still executes the fetch, others recover those messages
        finally:
            self._asked = self._in_poll = None
            connection.disconnect()

    # -- one client ------------------------------------------------------------------------------------------------

    def _create_client(self, asynchronous: bool = False) -> Any:
        """Replaces one client for each command by one for each connection pool; a client has no other state."""
        if asynchronous:  # a channel has one, and keeps it
            return super()._create_client(asynchronous=True)
        if self._kept_client is None or self._kept_client.connection_pool is not self.pool:
            self._kept_client = super()._create_client()
        return self._kept_client

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Adds to kombu's: a connection breaks if its server accepts no writes; notices of maintenance are off.

        A polled connection is removed from the poll before it is closed. A forked process keeps its socket open, so the
        poll would still report it, under a number that another connection has by then.
        """
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        kind = breaking(parameters["connection_class"], before_closing=self._leave_poll if asynchronous else None)
        return {**parameters, **WITHOUT_NOTICES, "connection_class": kind}

    def _leave_poll(self, polled: Any) -> None:
        cycle = self.connection and self.connection.cycle
        if cycle:
            with suppress(AttributeError, KeyError, OSError, TypeError, ValueError):  # it is not polled, or no longer
                cycle.poller.unregister(polled)

    @property
    def _client_of_scripts(self) -> Any:
        """A client that adds no prefix to keys."""
        if self._plain_client is None or self._plain_client.connection_pool is not self.pool:
            self._plain_client = Redis(connection_pool=self.pool)
        return self._plain_client

    @cached_property
    def _put_of_batches(self) -> Any:
        return self._create_client().register_script(PUT.text)

    @cached_property
    def keys(self) -> Keys:
        """The keys of this broker."""
        return Keys(self.global_keyprefix, self.sep)

    @cached_property
    def acknowledgements(self) -> Acknowledgements:
        """The acknowledgements of this channel."""
        return Acknowledgements(self)

    @cached_property
    def _line(self) -> Line:
        return Line(lambda: self.pool.make_connection())

    @property
    def records(self) -> Records:
        """The records of all consumers of this broker."""
        return Records(self._client_of_scripts, self.keys, delivery_limit=self.delivery_limit)

    def _lists_of(self, queue: str) -> list[str]:
        return [self.keys.kombu_list(self._q_for_pri(queue, step)) for step in self.priority_steps]

    # -- the consumer ----------------------------------------------------------------------------------------------

    def waited_for(self) -> list[tuple[str, list[str]]]:
        """Return the queues that it waits for now, each with the keys of its lists."""
        if self._asked is not Asked.WAIT:
            return []
        return [(queue, self._lists_of(queue)) for queue in self.active_queues]

    def _renew(self) -> None:
        """Become another consumer: an answer was lost."""
        self.consumer.renew()
        self._asked = None
        self._fetching.is_idle = False

    @contextmanager
    def renewing_if_struck(self) -> Iterator[None]:
        """Become another consumer if fetched messages cannot be delivered, for example because of a time limit."""
        try:
            yield
        except BaseException:
            self._renew()
            raise

    def refuse(self, delivery_tag: str, verb: str) -> None:
        """Announce the end of a message that is not ours any more."""
        tell_refused(verb, parted(delivery_tag)[0], delivery_tag)
        self.consumer.note_silence()  # its other messages were taken away too

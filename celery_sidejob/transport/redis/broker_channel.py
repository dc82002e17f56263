"""kombu's Redis channel, with a fetch that cannot lose a message: one script takes and records it.

Fetching has two steps on the connection that kombu polls. A *fetch* takes the messages for this consumer, and
is answered at once. If it finds none, the channel *waits* for the bell of one of its queues. Our own publishers
ring it; for publishers with kombu's transport this process' heart does. The blocking wait is for a bell and
never a message, so an answer that nobody reads loses nothing.
"""

from __future__ import annotations

import enum
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from queue import Empty
from time import monotonic
from typing import Any

from kombu.log import get_logger
from kombu.transport import redis, virtual
from kombu.utils.json import dumps, loads
from kombu.utils.scheduling import priority_cycle, round_robin_cycle
from redis import Redis
from redis.exceptions import ConnectionError, NoScriptError

from .. import begun
from ..announcements import message_refused
from ..decoding import Message, NotAMessageError, made
from .acknowledgements import Acknowledgement, Acknowledgements
from .connections import WITHOUT_NOTICES, breaking, has_come
from .dead import DeadList
from .keys import Keys
from .line import Line
from .qos import QoS
from .records import BELL_MS, Records
from .scripts import FETCH, PUT

logger = get_logger(__name__)

AT_MOST = 32
"""The most messages that one fetch takes."""
LOOK_AT_ONCE = 1000
"""How many queues one fetch checks, because Redis does nothing else meanwhile. More are checked page by page."""
GOODBYE_S = 1.0
"""How long a closing channel waits for the answer to its last fetch."""


class Asked(enum.Enum):
    """The command on the connection that kombu polls whose answer is outstanding."""

    FETCH = enum.auto()
    WAIT = enum.auto()


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch whose answer is outstanding."""

    consumer: str
    number: int
    queues: Sequence[str]


@dataclass(frozen=True, slots=True)
class Taken:
    """A fetched message."""

    queue: str
    text: bytes
    tag: str | None
    """The token of this delivery; None if no acknowledgement is expected, so nothing is recorded."""


class Channel(redis.Channel):
    """A channel that fetches reliably; the lists are as kombu's own transport has them, whose workers may share them.

    It is a consumer of its own, and a new one after an answer to a fetch was lost: what that brought is given back.
    """

    QoS = QoS
    Message = Message
    DeadList = DeadList
    from_transport_options = (
        *redis.Channel.from_transport_options,
        "consumer_timeout",
        "loop_timeout",
        "delivery_limit",
        "dead_list_limit",
        "dead_list_days",
    )
    consumer_timeout = 3.5
    """Seconds of silence after which a consumer is dead."""
    loop_timeout: float | None = 30.0
    """Seconds for which the thread that consumes may stand still before its consumers are left to others; None for any
    time."""
    delivery_limit: int | None = 20
    """How often a message that had begun may come back before it goes to the dead list; None for any number."""
    dead_list_limit: int | None = 10_000
    dead_list_days: float | None = 90
    """How many messages the dead list keeps, and for how long; None for any number, and for ever."""

    _kept_client: Any = None
    _plain_client: Any = None
    _heart: Any = None
    _consumer: str | None = None
    _consumer_pid: int | None = None
    _retired: tuple[str, ...] = ()
    _next_look_at = 0.0
    _fetches = 0
    _asked: Asked | None = None
    _polled: Fetch | None = None
    _page = 0
    _barren_pages = 0
    _is_idle = False
    _is_buffered = False
    _knows_scripts = True
    _was_silent = False
    _alone: tuple[str, float] | None = None
    """The delivery tag of a message that is kept alone, and until when."""

    # -- what a message goes through ------------------------------------------------------------------------------

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """Replaces kombu's push: pushes to the same list, and rings the queue's bell in the same step."""
        name = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
        expires_ms = self._expires.get(queue)
        expiring = [] if expires_ms is None else self._lists_of(queue)
        keys = [self._keys.kombu_list(name), self._keys.bell(queue), *expiring]
        arguments = [BELL_MS, expires_ms or 0, dumps(message)]
        batch = options.pop("_publish_batch", None)
        if batch is None:
            self._line.run(PUT, keys, arguments, client=self._client_of_scripts)
            return
        # Load the script first: it cannot be sent again in the middle of a batch.
        batch.pipeline.scripts.add(self._put_of_batches)
        # kombu's client puts the prefix before the first key of a script, and before no other.
        batch.add("evalsha", PUT.sha, len(keys), name, *keys[1:], *arguments)

    def push_command(self, name: str, *messages: str) -> list[Any]:
        """Return the command that puts messages into a list, for a publisher that does not await the answer.

        It holds the script's text: without an answer nobody could send it again to a server that lacks the script.
        """
        keys = [self._keys.kombu_list(name), self._keys.bell(self._keys.queue_of(self._keys.kombu_list(name)))]
        return PUT.command(keys, [BELL_MS, 0, *messages], by_text=True)

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **options: Any) -> Any:
        """Adds to kombu's: without acknowledgements nothing is recorded; a new queue awaits no old bell."""
        (self._unrecorded.add if no_ack or not self.ack_emulation else self._unrecorded.discard)(queue)
        result = super().basic_consume(queue, no_ack, callback, consumer_tag, **options)
        self._is_idle = False
        if self._asked is Asked.WAIT and self._in_poll:
            self._in_poll.disconnect()  # only a bell can be missed
        return result

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Replaces kombu's pop and later record, if an acknowledgement is expected."""
        if no_ack or not self.ack_emulation:
            return super().basic_get(queue, no_ack=no_ack, **options)
        self._mind_retired()
        with self._retiring_if_struck():
            taken = self._fetch_now(queue)
            self._maybe_update_queues_expire(self._create_client(), queue)
            for payload, one in self._decoded(taken):
                try:
                    message = self.Message(payload, channel=self)
                except NotAMessageError as error:
                    self._bury(one, error)
                    continue
                self.qos.append(message, message.delivery_tag)
                return message
        return None

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Replaces kombu's blocking pop: fetches, or waits for a bell if the last fetch found nothing."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        if self._asked is Asked.FETCH:  # its connection broke without an answer
            self._retire()
        self._mind_retired()
        if self._is_idle:
            asked = Asked.WAIT
            command = ["BRPOP", *self._keys.bells(queues), (self.brpop_timeout if timeout is None else timeout) or 0]
        else:
            asked = Asked.FETCH
            self._polled, command = self._fetch(self._page_of(queues), self._room())
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
        self._is_idle = False
        if asked is not Asked.FETCH:
            self._asked = None
            raise Empty
        with self._retiring_if_struck():  # until here it counts as unanswered, with the same effect
            self._asked = None
            assert self._polled is not None
            taken = self._taken(self._polled, answer)
            self._turn_page(bool(taken))
            # Not right after the delivery: Celery delays acknowledgements until its loop has gone round once.
            last = next(reversed(self.qos._delivered), None)
            self._is_buffered = last is not None and last not in self.qos._dirty
            for one in taken:
                self._queue_cycle.rotate(one.queue)
        if not self._deliver(taken):
            raise Empty
        return True

    def _read_answer(self) -> Any:
        """Read Redis' answer; raises Empty if none has arrived, because everything else waits for this thread."""
        connection = self.client.connection
        if not has_come(connection):
            raise Empty
        try:
            with self.connection.pulse.reading():
                return connection.read_response()
        except NoScriptError:  # the server was restarted, or a failover has replaced it
            self._asked, self._knows_scripts = None, False
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
        """Forget a finished message, if it is still ours; otherwise announce that it is not."""
        consumer, token = _parted(delivery_tag)
        if not consumer:
            return
        one = Acknowledgement(consumer, token, verb)
        if self.closed:  # closing it gave back everything
            self._refuse(one)
        elif self.connection.has_loop:
            self._acknowledgements.write(one)
        elif not self._records.acknowledge(consumer, token):
            self._refuse(one)

    def hear(self) -> None:
        """Read the answers to acknowledgements; announce those that Redis refused."""
        self._acknowledgements.hear()

    def send_back(self, delivery_tag: str) -> None:
        """Give a message that had begun back to the head of its list, behind those that came back before.

        This counts: a message that came back too often goes to the dead list. Announces one that is no longer ours.
        """
        consumer, token = _parted(delivery_tag)
        if consumer and (self.closed or not self._records.send_back(consumer, token)):
            self._refuse(Acknowledgement(consumer, token, "requeue"))

    def give_back(self, delivery_tag: str) -> None:
        """Give a message that has not begun back to the head of its list; not counted. Announces one no longer ours."""
        consumer, token = _parted(delivery_tag)
        if consumer and (self.closed or not self._records.give_back(consumer, [token])):
            self._refuse(Acknowledgement(consumer, token, "requeue"))
        virtual.QoS.ack(self.qos, delivery_tag)

    def is_alone(self) -> bool:
        """Tell whether a message whose worker died or left is kept alone, so that nothing may be fetched now."""
        if self._alone is None:
            return False
        tag, until = self._alone
        if tag in self.qos._delivered and tag not in self.qos._dirty and monotonic() < until:
            return True
        self._alone = None
        return False

    def held(self, at_most: int) -> Iterator[bytes]:
        """Yield messages that consumers hold, at most this many: for a search for one that waits in no list."""
        return self._records.held(at_most)

    # -- its end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Replaces kombu's wait for the blocking pop, which may take long; gives back all held messages at once."""
        if not self.closed:
            self._hang_up()
            self.leave()
        super().close()
        self._line.close()
        self._disconnect_pools()

    def leave(self) -> None:
        """Give back all messages of this channel, in their order, and stop being a consumer."""
        if self._consumer_pid != os.getpid():
            return  # a forked copy holds nothing
        leaving = [*self._retired, *([self._consumer] if self._consumer else [])]
        self._consumer, self._retired, self._is_idle = None, (), False
        for consumer in leaving if self._heart is not None else ():  # without a consumer nothing was recorded
            self._heart.forget(consumer)
            try:
                # Otherwise finished messages would be given back. Later than this, others have declared us dead.
                self._acknowledgements.settle(within_s=self.consumer_timeout)
                self._records.leave(consumer, begun=_tokens(begun.running(), consumer))
            except (*self.connection_errors, self.ResponseError) as error:
                logger.warning(
                    "The messages of %s could not be given back; other workers will recover them: %s", consumer, error
                )
        self._acknowledgements.close()

    def _hang_up(self) -> None:
        """Drop the polled connection; a message that a fetch takes at this moment is in the record, and goes back."""
        connection = self._in_poll
        if not connection:
            return
        try:
            if self._asked is Asked.FETCH and connection.can_read(timeout=GOODBYE_S):
                connection.read_response()
        except (*self.connection_errors, self.ResponseError):
            pass  # no answer: if Redis still carries the fetch out, others recover those messages
        finally:
            self._asked = self._in_poll = None
            connection.disconnect()

    # -- one client ------------------------------------------------------------------------------------------------

    def _create_client(self, asynchronous: bool = False) -> Any:
        """Replaces one client for each command with one for each connection pool; a client has no other state."""
        if asynchronous:  # a channel has one, and keeps it
            return super()._create_client(asynchronous=True)
        if self._kept_client is None or self._kept_client.connection_pool is not self.pool:
            self._kept_client = super()._create_client()
        return self._kept_client

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        """Adds to kombu's: a connection breaks if its server accepts no writes; none has notices.

        A polled connection leaves the poll before it is closed. A forked process keeps its socket open, so
        the poll would go on to report it, under a number that another connection has by then.
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
    def _keys(self) -> Keys:
        return Keys(self.global_keyprefix, self.sep)

    @cached_property
    def _unrecorded(self) -> set[str]:
        return set()

    @cached_property
    def _acknowledgements(self) -> Acknowledgements:
        return Acknowledgements(lambda: self._records, lambda: self.pool.make_connection(), self._refuse)

    @cached_property
    def _line(self) -> Line:
        return Line(lambda: self.pool.make_connection())

    @property
    def _records(self) -> Records:
        return Records(self._client_of_scripts, self._keys, delivery_limit=self.delivery_limit)

    def _lists_of(self, queue: str) -> list[str]:
        return [self._keys.kombu_list(self._q_for_pri(queue, step)) for step in self.priority_steps]

    # -- fetching --------------------------------------------------------------------------------------------------

    def _fetch(self, queues: Sequence[str], room: int) -> tuple[Fetch, list[Any]]:
        """Return the next fetch and its command; each fetch of a channel has its own number."""
        consumer = self._registered_consumer(queues)
        self._fetches += 1
        lists = [
            self._keys.kombu_list(self._q_for_pri(queue, step)) for step in self.priority_steps for queue in queues
        ]
        unrecorded = "".join("1" if queue in self._unrecorded else "0" for queue in queues)
        keys = [self._keys.consumers, self._keys.held(consumer), *lists, *self._keys.bells(queues)]
        arguments = [
            consumer, self._fetches, room, round(self.consumer_timeout * 1000), len(queues), len(self.priority_steps),
            int(self._rotates), unrecorded, BELL_MS,
        ]  # fmt: skip
        by_text, self._knows_scripts = not self._knows_scripts, True
        command = FETCH.command(keys, arguments, by_text=by_text)
        return Fetch(consumer, self._fetches, list(queues)), command

    def _page_of(self, queues: Sequence[str]) -> Sequence[str]:
        """Return the queues that the next fetch checks."""
        first = self._page * LOOK_AT_ONCE
        if first >= len(queues):
            self._page = first = 0
        return queues[first : first + LOOK_AT_ONCE]

    def _turn_page(self, was_there_any: bool) -> None:
        """Go to the next page, in a fixed order back to the first after a find; idle once all pages were empty."""
        self._barren_pages = 0 if was_there_any else self._barren_pages + 1
        self._page = 0 if was_there_any and not self._rotates else self._page + 1
        self._is_idle = self._barren_pages * LOOK_AT_ONCE >= len(self.active_queues)
        if self._is_idle:
            self._page = self._barren_pages = 0

    def _fetch_now(self, queue: str) -> list[Taken]:
        """Fetch one message of a queue and wait for the answer; without redis-py's retries, which would fetch twice."""
        for by_text in (False, True):
            self._knows_scripts = not by_text
            fetch, command = self._fetch([queue], 1)
            connection = self.pool.get_connection()
            try:
                connection.send_command(*command)
                return self._taken(fetch, connection.read_response())
            except NoScriptError:
                continue
            except BaseException:  # at a time limit: the answer would be read as that of the next one
                connection.disconnect()
                raise
            finally:
                self.pool.release(connection)
        raise AssertionError("a script sent as text is known")

    def _taken(self, fetch: Fetch, answer: Sequence[Any]) -> list[Taken]:
        """Decode the answer to a fetch."""
        if self._heart is not None:
            self._heart.registered(fetch.consumer)
        taken = []
        for place in range(0, len(answer), 2):
            queue = fetch.queues[answer[place] - 1]
            tag = None if queue in self._unrecorded else f"{fetch.consumer}#{fetch.number}.{place // 2 + 1}"
            taken.append(Taken(queue, answer[place + 1], tag))
        return taken

    def _room(self) -> int:
        """Return how many messages may be fetched: several only where a prefetch says that so many are wanted.

        One where they are worked on as they are handed over (the pool solo), so that the others need not wait for that;
        where somebody else tells whether one more may be (Celery's worker_disable_prefetch) and not how many, or in
        which order queues are served (a class of a project's own).
        """
        told = vars(self.qos)
        one_by_one = "can_consume" in told and "can_consume_max_estimate" not in told
        if not self._is_buffered or one_by_one or not (self._rotates or self._keeps_order):
            return 1
        free = self.qos.can_consume_max_estimate()
        return 1 if free is None else max(1, min(free, AT_MOST))

    @property
    def _rotates(self) -> bool:
        return type(self._queue_cycle).rotate is round_robin_cycle.rotate

    @property
    def _keeps_order(self) -> bool:
        return type(self._queue_cycle).rotate is priority_cycle.rotate

    def _deliver(self, taken: Sequence[Taken]) -> bool:
        """Deliver messages in their order; those that cannot be delivered go back to their places."""
        delivered = False
        left: list[str] = []
        with self._retiring_if_struck():
            rest = deque(self._decoded(taken))
        try:
            while rest:
                payload, one = rest[0]
                if one.tag is not None and one.queue not in self.connection._callbacks:  # cancelled meanwhile
                    left.append(one.tag)
                else:
                    self._mind_suspect(payload, one)
                    try:
                        self.connection._deliver(payload, one.queue)
                        delivered = True
                    except NotAMessageError as error:
                        self._bury(one, error)
                rest.popleft()
        finally:
            left += [one.tag for _, one in rest if one.tag is not None and one.tag not in self.qos._delivered]
            if left:
                consumer, _ = _parted(left[0])
                with self._retiring_if_struck():
                    self._records.give_back(consumer, [_parted(tag)[1] for tag in left])
        return delivered

    def _mind_suspect(self, payload: Any, one: Taken) -> None:
        """Fetch nothing beside a message whose worker died or left, so that the next death can be charged to it alone.

        That lasts until the heart has noted which messages have begun: from then on a death is charged to those. From
        half of the delivery limit on it lasts until the message is done, as messages that run long beside it may be to
        blame just as well.
        """
        properties, limit = payload["properties"], self.delivery_limit
        is_suspect = begun.SUSPECT in properties and not begun.is_for_later(payload.get("headers") or {})
        if is_suspect and one.tag is not None:
            is_grave = limit is not None and 2 * begun.returns(properties) >= limit
            self._alone = one.tag, inf if is_grave else monotonic() + self.consumer_timeout

    def _decoded(self, taken: Iterable[Taken]) -> Iterator[tuple[Any, Taken]]:
        """Decode messages; bury those that are invalid."""
        for one in taken:
            try:
                payload = made(partial(_payload_of, one))
            except NotAMessageError as error:
                self._bury(one, error)
            else:
                yield payload, one

    def _bury(self, one: Taken, error: NotAMessageError) -> None:
        logger.error("Queue %r had %.200r: %s", one.queue, one.text, error.reason)
        if one.tag is not None:
            self._records.bury(*_parted(one.tag), error.reason)

    # -- who fetches -----------------------------------------------------------------------------------------------

    def _registered_consumer(self, queues: Iterable[str]) -> str:
        """Return this channel's consumer in Redis; a heart beats for it if anything is recorded."""
        if self._consumer is None or self._consumer_pid != os.getpid():
            if self._consumer_pid != os.getpid():
                self._retired = ()
            self._consumer_pid = os.getpid()
            self._consumer = f"{socket.gethostname()}:{self._consumer_pid}:{secrets.token_hex(6)}"
            self._heart = None
        if self._heart is None and not self._unrecorded.issuperset(queues):
            self._heart = self.connection.heart_for(self)
            self._heart.watch(self._consumer, self._waited_for, self._note_silence, self._unbegun_of(self._consumer))
        return self._consumer

    def _unbegun_of(self, consumer: str) -> Callable[[], set[str]]:
        return lambda: _tokens(begun.waiting(), consumer)

    def _waited_for(self) -> list[tuple[str, list[str]]]:
        if self._asked is not Asked.WAIT:
            return []
        return [(queue, self._lists_of(queue)) for queue in self.active_queues]

    def _retire(self) -> None:
        """Become another consumer: an answer was lost, so the record may hold messages that never arrived here."""
        if self._consumer is not None and self._heart is not None:
            self._retired += (self._consumer,)
        self._consumer = self._asked = None
        self._is_idle = False
        self._next_look_at = 0.0

    @contextmanager
    def _retiring_if_struck(self) -> Iterator[None]:
        """Become another consumer if fetched messages cannot be delivered, for example at a time limit."""
        try:
            yield
        except BaseException:
            self._retire()
            raise

    def _mind_retired(self) -> None:
        """Give back messages in the records of this channel's former consumers that never arrived.

        Repeated while those consumers have messages in progress, because a fetch may be carried out late.
        """
        if not self._retired or monotonic() < self._next_look_at:
            return
        self._next_look_at = monotonic() + self.consumer_timeout
        self._acknowledgements.settle()
        for consumer in self._retired:
            known = {_parted(tag)[1] for tag in list(self.qos._delivered) if _parted(tag)[0] == consumer}
            unheard = set(self._records.tokens(consumer)) - known
            if unheard:
                self._records.give_back(consumer, unheard)
            if not known - self.qos._dirty:
                self._retired = tuple(one for one in self._retired if one != consumer)
                self._heart.forget(consumer)
                self._records.leave(consumer)

    def _note_silence(self) -> None:
        """Have the next fetch check first whether messages were taken away; other threads call this too."""
        self._was_silent = True

    def mind_silence(self) -> None:
        """Break the connection if we were declared dead and our messages were taken away.

        So the application learns of it, as with RabbitMQ. A Celery worker drops messages that it has not begun, cancels
        tasks if `worker_cancel_long_running_tasks_on_connection_loss` says so, and connects again.
        """
        if not self._was_silent:
            return
        self._was_silent = False
        held = {tag: message for tag, message in list(self.qos._delivered.items()) if tag not in self.qos._dirty}
        consumers = {consumer for consumer, _ in map(_parted, held) if consumer}
        ours = {f"{consumer}#{token}" for consumer in consumers for token in self._records.tokens(consumer)}
        taken = [message for tag, message in held.items() if _parted(tag)[0] and tag not in ours]
        for message in taken:
            logger.warning(
                "%s[%s] was taken from this worker, which was silent for too long, and goes to another one: if it has "
                "begun here, it runs twice", message.headers.get("task"), message.headers.get("id"),
            )  # fmt: skip
        if taken:
            raise ConnectionError(f"{len(taken)} messages were taken from this worker, which was declared dead")

    def _refuse(self, one: Acknowledgement) -> None:
        delivery_tag = f"{one.consumer}#{one.token}"
        logger.warning(
            "Cannot %s the message %s: %s was declared dead or has lost its connection, and the message has gone to "
            "another consumer",
            one.verb, delivery_tag, one.consumer,
        )  # fmt: skip
        message_refused.send(verb=one.verb, consumer=one.consumer, delivery_tag=delivery_tag)
        self._note_silence()  # its other messages were taken away as well


def _payload_of(one: Taken) -> Any:
    """Return a message's text with this delivery's tag in place of its permanent one."""
    payload = loads(one.text.decode())
    own_tag = payload["properties"]["delivery_tag"]
    payload["properties"]["delivery_tag"] = one.tag or own_tag
    return payload


def _tokens(tags: Iterable[str], consumer: str) -> set[str]:
    """Return the tokens of the delivery tags that belong to this consumer."""
    return {token for owner, token in map(_parted, tags) if owner == consumer}


def _parted(delivery_tag: str) -> tuple[str, str]:
    """Split a delivery tag into its consumer and the token in the record; no consumer if the tag is not ours."""
    consumer, _, token = str(delivery_tag).rpartition("#")
    return consumer, token

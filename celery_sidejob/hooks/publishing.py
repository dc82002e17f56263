"""Giving messages to the broker: one bounded attempt, then a pause for the whole process.

A connection of our own, because Celery's waits for a broker that is down (0.8 s refused, for ever when silent) and
shares its channel with the user's publishes. The messages are durable rows, so giving up loses nothing. On RabbitMQ a
message counts as published when the broker has confirmed that a queue has it (`hooks/rabbitmq.py`).
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from celery import Celery
from celery.canvas import maybe_signature
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads

from ..model.buried import Buried, Place
from ..model.crash_points import reach
from ..model.durable import Key, Message
from ..model.errors import SettingsError
from ..model.messages import FORMAT, Continuation, Doorbell
from ..model.protocols import Publication
from ..model.sight import Look
from . import configuration, events, kept_message, rabbitmq, redis_dead
from .redis_client import NotAlone, Packed, Pushes, keep_client, pushes_of
from .redis_look import RedisLook

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")

HEADER = "sidejob"
ATTEMPT_S = 1.0
PAUSE_S = (1.0, 5.0)
"""After a failure this process leaves the broker alone for a random time between these."""

WARN_S = 60.0
"""How often a process says that the broker is away: an outage of an hour is not a thousand warnings."""

FAILED_S = 60.0
"""How long it is remembered that Redis did not take a message: until its mark is not written."""
TOGETHER = 500
"""How many messages are given to the broker at once."""

INLINE: ContextVar[set[int] | None] = ContextVar("celery_sidejob_inline", default=None)
"""In eager mode: the jobs that were asked for, which are run right here, so that no worker is to be told of them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Messages as they are sent, each the key of a list and what is put there, over a connection that is open."""

    pushes: Pushes
    made: Sequence[tuple[str, str]]
    packed: Packed | None = None
    """Of one message alone: what is left to do is to send it."""

    def part(self, first: int, count: int) -> Ready:
        """Return some of them."""
        return Ready(self.pushes, self.made[first : first + count])


class CeleryPublisher:
    """Publishes doorbells and continuations of one app."""

    def __init__(self, app: Celery, schema: str, run_here: Callable[[set[int]], None], *, lease_s: float) -> None:
        self._app = app
        self._lease_s = lease_s
        self._run_here = run_here
        self._schema = schema
        self._exchanges: dict[str | None, rabbitmq.MarkerExchange] = {}
        self._lock = threading.RLock()  # a continuation may make a job, whose doorbell is published within
        self._pid = os.getpid()
        self._producer: Producer | None = None
        self._declared: set[str] = set()
        """Queues of ordinary tasks that this connection has declared."""
        self._pushes: Pushes | None = None
        """Of a Redis: what is sent without waiting for the answer."""
        self._unanswered: Message | None = None
        self._failed: dict[Key, float] = {}
        """What was sent so and not taken, and when."""
        self._paused_until = float("-inf")
        self._warned_at = float("-inf")
        self._refusing: dict[str, float] = {}
        """Queues that took no message though the broker is there, and until when they are passed over."""

    @property
    def ready(self) -> bool:
        """Whether the pause after the last failure is over."""
        return time.monotonic() >= self._paused_until

    def publish(self, messages: Sequence[Publication], *, ready: Ready | None = None) -> Sequence[Publication]:
        """Publish in order until the broker fails, and return what it was given; a queue that refuses is passed over.

        `ready` is what `make_ready` has made of these messages.
        """
        self._mind_fork()
        sent: list[Publication] = []
        ordinary = [message for message in messages if isinstance(message, Message)]
        if len(ordinary) < len(messages):
            messages, sent = self._for_others(messages)
        if not messages or not self.ready:
            return sent
        with self._lock:
            if len(ordinary) == len(messages) > 1:
                return sent + self._publish_together(ordinary, ready)
            return sent + self._publish_each(messages, ready)

    def _for_others(self, messages: Sequence[Publication]) -> tuple[Sequence[Publication], list[Publication]]:
        """Run here what eager mode runs here; returns what is left for workers, and what was continued here."""
        eager = self._app.conf.task_always_eager
        inline = INLINE.get()
        continued: list[Publication] = []
        if eager or inline is not None:
            asked_for = {message.job_id for message in messages if isinstance(message, Doorbell)}
            messages = [message for message in messages if not isinstance(message, Doorbell)]
            if inline is not None:
                inline.update(asked_for)
            elif asked_for:
                self._run_here(asked_for)
        if eager:
            continued += self._continue_here([message for message in messages if isinstance(message, Continuation)])
            messages = [message for message in messages if isinstance(message, Message)]
        return messages, continued

    def make_ready(self, messages: Sequence[Message]) -> Ready | None:
        """Make what is to be sent of messages to Redis, and send none: their rows are written meanwhile.

        None where each is not one message for one list: then `publish` does all of it, and says what is wrong. What is
        made is of the connection that there was, and worth nothing after another one was opened.
        """
        if not self.ready or self._family != "redis":
            return None
        self._mind_fork()
        with self._lock:
            try:
                self._hear()
                ready = self._made_of(messages)
                if ready is None or len(messages) > 1:
                    return ready
                ready.pushes.mend()
                return replace(ready, packed=ready.pushes.pack(ready.made))
            except BaseException as error:
                self._mind_strike(error)
                if self._producer is None or self._is_connection_error(error):  # and `publish` need not wait for it
                    self._pause(error)
                return None

    def confirm(self, published: Sequence[Key]) -> list[Key]:
        """Wait for the last answer that is owed, and return which of these messages the broker has."""
        self._mind_fork()
        with self._lock:
            try:
                self._hear()
            except BaseException as error:
                self._mind_strike(error)
                self._pause(error)
            return [key for key in published if key not in self._failed]

    def _publish_together(self, messages: Sequence[Message], ready: Ready | None) -> list[Publication]:
        """Give the broker messages of ordinary tasks, those of a page at once.

        A page that it did not take so is given one by one, to find out which it does not want: copies do no harm.
        """
        sent: list[Publication] = []
        for first in range(0, len(messages), TOGETHER):
            whole = messages[first : first + TOGETHER]
            page = [message for message in whole if not self._refuses(message)]
            made = ready.part(first, TOGETHER) if ready is not None and len(page) == len(whole) else None
            reused = self._producer is not None
            try:
                reach("publish-together:before")
                if not self._send_together(page, made):
                    sent += self._publish_each(page)
                    continue
                reach("publish-together:after")
                sent += page
            except BaseException as error:
                self._mind_strike(error)
                cause = error.__cause__ or error
                if (self._producer is None or self._is_connection_error(cause)) and not self._is_stale(cause, reused):
                    self._pause(error)
                    break
                self._drop_connection()
                sent += self._publish_each(page)
        return sent

    def _publish_each(self, messages: Sequence[Publication], ready: Ready | None = None) -> list[Publication]:
        sent: list[Publication] = []
        for message in messages:
            if not self.ready:
                break
            if self._refuses(message):
                continue
            try:
                self._hear()
                reach("publish:before")
                self._send_anew_if_stale(message, ready)
                reach("publish:after")
            except BaseException as error:
                self._mind_strike(error)
                if self._producer is None or self._is_connection_error(error):  # or it could not be opened
                    self._pause(error)
                elif isinstance(message, Continuation) or _is_its_own(message, error):
                    logger.exception("A message cannot be published; it is tried again: %s", message.task_id)
                else:
                    self._pass_over(message.queue, error)
            else:
                sent.append(message)
        return sent

    def close(self) -> None:
        """Let go of the connection; the next publish opens another."""
        self._mind_fork()
        with self._lock:
            with suppress(Exception):
                self._hear()
            self._drop_connection()

    @property
    def knows_queues(self) -> bool:
        """Whether a queue can vanish by itself, and tells how many messages wait in it: on RabbitMQ."""
        return self._family == "amqp"

    def was_emptied(self, store: str | None = None) -> bool:
        """Look for a store's marker in the broker, and put it there: a key in Redis, an exchange in RabbitMQ."""
        self._mind_fork()
        marked = self._schema if store is None else f"{self._schema}:{store}"
        with self._lock:
            try:
                channel, family = self._channel(), self._family
                if family == "redis":
                    there = channel.client.set(f"celery_sidejob:marker:{marked}", "1", get=True, keepttl=False)
                elif family == "amqp":
                    if store not in self._exchanges:
                        self._exchanges[store] = rabbitmq.MarkerExchange(marked)
                    there = self._exchanges[store].is_there(channel.connection)
                else:
                    return False
            except BaseException as error:
                self._mind_strike(error)
                self._pause(error)
                return False
        # The first look of a process finds no marker on a fresh broker: publishing everything once more is harmless.
        return not there

    def ready_messages(self, queue: str) -> int | None:
        """Count the messages of a RabbitMQ's queue that no worker has fetched; GONE without the queue, else None."""
        if not self.knows_queues:
            return None
        found = self._ask(lambda channel: rabbitmq.counts(channel.connection, queue))
        return None if found is None else found[0]

    def waiting(self, queue: str) -> tuple[int, int]:
        """Count the messages that wait in a RabbitMQ's queue, and its consumers; (0, 0) if that is not known now."""
        ready, consumers = self._ask(lambda channel: rabbitmq.counts(channel.connection, queue)) or (0, 0)
        return max(0, ready), consumers

    def look(self) -> Look | None:
        """Begin a look for single messages; None where the broker shows none: on all but Redis."""
        return RedisLook(self._ask, fetched_within_s=self._lease_s) if self._family == "redis" else None

    def dead_list(self) -> int | None:
        """Count what our transport has given up; None with another transport, or a broker that does not answer."""
        return self._ask(redis_dead.count) if self._has_dead_list else None

    def buried(self, place: Place) -> tuple[Place, Sequence[Buried]]:
        """Read a page of our transport's dead list, where the broker has that transport."""
        if not self._has_dead_list:
            return place, ()
        return self._ask(lambda channel: redis_dead.page(channel, place, doorbell=HEADER)) or (place, ())

    def forget_buried(self, texts: Sequence[bytes]) -> bool:
        """Remove entries of that list; False if the broker does not answer."""
        return bool(self._ask(lambda channel: redis_dead.forget(channel, texts)))

    def announce(self, send: Callable[[Producer], Any]) -> None:
        """Send a monitoring event, if the broker is there."""
        self._ask(lambda channel: send(self._open()))

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """Ask the broker something; None if it does not answer, which begins a pause, or not this question."""
        self._mind_fork()
        with self._lock:
            if not self.ready:
                return None
            try:
                return question(self._channel())
            except BaseException as error:
                self._mind_strike(error)
                if self._producer is None or self._is_connection_error(error):
                    self._pause(error)
                else:
                    logger.info("The broker does not answer (%s: %s)", type(error).__name__, error)
                return None

    # ------------------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Receive the answer to what was sent last; raises only after a silence, for the broker then is away."""
        message, self._unanswered = self._unanswered, None
        if message is None or self._pushes is None:
            return
        try:
            self._pushes.hear()
        except BaseException as error:
            self._fail(message)
            self._mind_strike(error)
            if not self._is_connection_error(error):
                self._pass_over(message.queue, error)
                return
            logger.info("Redis has hung up, and may not have %s (%s); it is looked for", message.task_id, error)
            self._drop_connection()
            if isinstance(error, self._silences):
                raise

    def _mind_strike(self, error: BaseException) -> None:
        """Raise what is meant for the caller, over whom it has come here: its time limit, or that its greenlet ends.

        Half a message may be written, so the connection is given up; the sweeper publishes it.
        """
        if not isinstance(error, Exception) or isinstance(error, SoftTimeLimitExceeded):
            self._drop_connection()
            raise error

    def _fail(self, message: Message) -> None:
        now = time.monotonic()
        self._failed = {key: at for key, at in self._failed.items() if now - at < FAILED_S}
        self._failed[message.task_id, message.generation] = now

    def _send_anew_if_stale(self, message: Publication, ready: Ready | None) -> None:
        """Send; once more on a new connection where the one we had turns out to be closed, as after a restart."""
        reused = self._producer is not None
        try:
            self._send(message, ready)
        except Exception as error:
            # After a silence nothing more is tried: this caller has waited long enough. A Redis client connects again
            # by itself.
            if not self._is_stale(error, reused):
                raise
            self._drop_connection()
            self._send(message)

    def _is_stale(self, error: BaseException, reused: bool) -> bool:
        broken = isinstance(error, self._connection_errors) and not isinstance(error, TimeoutError)
        return reused and broken and self._family == "amqp"

    def _made_of(self, messages: Sequence[Message]) -> Ready | None:
        producer = self._open()
        pushes = self._pushes
        # What was read from the store may have any exchange, and those of Redis may lead to many lists, or to none.
        if pushes is None or any(message.about is None or message.about["exchange"] for message in messages):
            return None
        try:
            with pushes.made_only() as made:
                for message in messages:
                    self._send_ordinary(message, producer)
        except NotAlone:
            return None
        return Ready(pushes, made) if len(made) == len(messages) else None

    def _send_together(self, messages: Sequence[Message], ready: Ready | None) -> bool:
        """Send messages at once, and wait for the answers; False where that cannot be done, and nothing was sent."""
        producer = self._open()
        if ready is None or ready.pushes is not self._pushes:
            ready = self._made_of(messages)
        if ready is not None:
            self._hear()
            ready.pushes.push(ready.made)
            ready.pushes.hear()
        elif not hasattr(producer, "batch"):  # which is of kombu 5.7
            return False
        else:
            with producer.batch(max_size=TOGETHER):
                for message in messages:
                    self._send_ordinary(message, producer)
        for message in messages:
            self._failed.pop((message.task_id, message.generation), None)
        return True

    def _send(self, message: Publication, ready: Ready | None = None) -> None:
        producer = self._open()
        if isinstance(message, Message):
            if ready is not None and ready.packed is not None and ready.pushes is self._pushes:
                ready.pushes.push_packed(ready.packed)
            else:
                self._send_ordinary(message, producer)
            self._failed.pop((message.task_id, message.generation), None)  # unless this try fails as well
            if self._pushes is not None:
                self._unanswered = message
            return
        if isinstance(message, Continuation):
            self._continue(message, producer=producer, retry=False)
        else:
            self._ring(message, producer)
        if self._pushes is not None:  # these are marked as published at once
            self._pushes.hear()

    def _send_ordinary(self, message: Message, producer: Producer) -> None:
        # A message that RabbitMQ returns is declared for anew.
        declared = self._declared if self._family != "amqp" else set()
        kept_message.publish(self._app, producer, message, declared=declared, timeout=ATTEMPT_S)

    def _ring(self, bell: Doorbell, producer: Producer) -> None:
        amqp = self._app.amqp
        options = dict(bell.options or {})
        header = {"v": FORMAT, "job": bell.job_id, "for_run": bell.for_run}
        headers, properties, body, _ = amqp.as_task_v2(
            bell.task_id,
            bell.task,
            args=(),
            kwargs={},
            argsrepr=events.shown_args(bell.job_id),
            kwargsrepr="{}",
            ignore_result=True,  # the asking's result is stored by its end, not by Celery's tracer
            shadow=options.get("shadow"),
            time_limit=options.get("time_limit"),
            soft_time_limit=options.get("soft_time_limit"),
            root_id=options.get("root_id"),
            parent_id=options.get("parent_id"),
            origin="celery_sidejob",
        )
        headers.update(options.get("headers") or {})
        headers[HEADER] = header
        queue = amqp.queues[bell.queue]
        exchange, routing_key = queue.exchange.name, queue.routing_key
        if (queue.exchange.type or "direct") == "direct":
            exchange, routing_key = "", queue.name
        producer.publish(
            body,
            exchange=exchange,
            routing_key=routing_key,
            declare=[queue],
            headers=headers,
            serializer="json",
            delivery_mode=queue.exchange.delivery_mode or self._app.conf.task_default_delivery_mode,
            retry=False,
            priority=self._priority(bell.priority),
            timeout=ATTEMPT_S,
            **properties,
        )
        events.announce_sent(self._app, bell, producer)

    def _priority(self, priority: int | None) -> int | None:
        """Translate "higher is sooner": Redis serves 0 first."""
        if priority is None:
            return None
        if self._family == "redis":
            return 9 - max(0, min(9, priority))
        return priority

    def _continue(self, continuation: Continuation, **how: Any) -> None:
        """Send a callback or the rest of a chain: a message of its own, or for a sidejob task a job.

        Its task id was fixed when the asking ended, so that a repetition is recognised as one.
        """
        kept = kombu_loads(continuation.publication)
        signature = maybe_signature(kept["signature"], app=self._app)
        signature.apply_async(tuple(kept["args"]), task_id=continuation.task_id, **how, **kept["options"])

    def _continue_here(self, continuations: Sequence[Continuation]) -> list[Continuation]:
        """In eager mode: run callbacks and the rest of chains in this process, without a broker."""
        done: list[Continuation] = []
        for continuation in continuations:
            try:
                self._continue(continuation)
            except Exception:
                logger.exception("A continuation failed; it is tried again: %s", continuation.task_id)
            else:
                done.append(continuation)
        return done

    # ------------------------------------------------------------------------------------------------------------

    def _open(self) -> Producer:
        if self._producer is None:
            self._declared = set()
            kind = rabbitmq.ConfirmedProducer if self._family == "amqp" else Producer
            self._producer = kind(self._connect())
        return self._producer

    @cached_property
    def _family(self) -> str:
        """The kind of broker by kombu's name: "redis", "amqp"."""
        return configuration.broker_family(self._app)

    @cached_property
    def _has_dead_list(self) -> bool:
        try:
            return self._family == "redis" and redis_dead.has_list(self._app.connection_for_write().transport.Channel)
        except SettingsError:  # a URL that cannot be read, of which others tell
            return False

    def _channel(self) -> Any:
        return self._open().channel

    def _connect(self) -> Any:
        """Open a channel in one attempt; kombu's own ways to one retry for seconds."""
        app = self._app
        options = dict(app.conf.broker_transport_options)
        if self._family == "redis":
            options.update(socket_timeout=ATTEMPT_S, socket_connect_timeout=ATTEMPT_S, retry_on_timeout=False)
        elif self._family == "amqp":
            options.update(confirm_publish=True)
        connection: Connection = app.connection_for_write(transport_options=options, connect_timeout=ATTEMPT_S)
        transport = connection.transport
        established = transport.establish_connection()
        if self._family != "amqp":
            channel = transport.create_channel(established)
            if self._family == "redis":
                keep_client(channel)
                self._pushes = pushes_of(channel)
            return channel
        try:
            rabbitmq.bound(established, ATTEMPT_S)
            return transport.create_channel(established)
        except BaseException:
            established.collect()
            raise

    def _pause(self, error: BaseException) -> None:
        pause_s = random.uniform(*PAUSE_S)
        now = time.monotonic()
        self._paused_until = now + pause_s
        loud = now - self._warned_at >= WARN_S
        self._warned_at = now if loud else self._warned_at
        logger.log(
            logging.WARNING if loud else logging.DEBUG,
            "The broker did not take a message (%s: %s); it is durable and goes out later. No broker call for %.1f s.",
            type(error).__name__,
            error,
            pause_s,
        )
        self._drop_connection()

    def _pass_over(self, queue: str, error: BaseException) -> None:
        """Leave one queue alone for a while: it is not declared, or something else has its name."""
        self._refusing[queue] = time.monotonic() + PAUSE_S[1]
        logger.warning(
            "Queue %r did not take a message (%s: %s); its messages go out later.", queue, type(error).__name__, error
        )
        self._drop_connection()  # with AMQP the channel is gone after such an error

    def _drop_connection(self) -> None:
        producer, self._producer = self._producer, None
        pushes, self._pushes = self._pushes, None
        if self._unanswered is not None:
            self._fail(self._unanswered)
            self._unanswered = None
        if pushes is not None:
            with suppress(Exception):
                pushes.close()
        if producer is not None:
            try:
                if self._family == "amqp":
                    producer.hang_up()
                else:
                    transport = producer.channel.connection
                    transport.close_connection(transport)
            except Exception as closing:
                logger.debug("Closing the broker connection failed: %s", closing)

    def _refuses(self, message: Publication) -> bool:
        return self._refusing.get(message.queue, 0.0) > time.monotonic()

    def _is_connection_error(self, error: BaseException) -> bool:
        if isinstance(error, OperationalError):  # what Celery makes of an error of the transport
            error = error.__cause__ or error
        if isinstance(error, KeyError):  # a queue that is not declared; kombu counts it among errors of its connections
            return False
        return isinstance(error, self._connection_errors)

    @cached_property
    def _silences(self) -> tuple[type[BaseException], ...]:
        """Errors that say that nobody has answered in time, which took as long."""
        redis = sys.modules.get("redis.exceptions")
        return (TimeoutError,) if redis is None else (TimeoutError, redis.TimeoutError)

    @cached_property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        return configuration.broker_errors(self._app)

    def _mind_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
            # The parent's: not even their destructors may speak on those sockets.
            _inherited.extend((self._producer, self._pushes))
            self._producer = self._pushes = self._unanswered = None
            self._failed = {}


def _is_its_own(message: Publication, error: BaseException) -> bool:
    """Tell whether an error is that of one durable task's message, and not of its queue."""
    return isinstance(message, Message) and isinstance(error, ValueError | TypeError)


_inherited: list[Any] = []


def publication(signature: Any, args: Sequence[Any], options: dict[str, Any]) -> str:
    """Return a continuation as text: the signature, what is put before its arguments, and its options."""
    text: str = kombu_dumps({"v": FORMAT, "signature": dict(signature), "args": list(args), "options": options})
    return text

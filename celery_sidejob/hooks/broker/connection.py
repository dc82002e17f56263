"""The connection on which a process publishes: no use of it lasts long, and after a failure there is a pause.

One of our own, because Celery's waits for a broker that is down (0.8 s refused, for ever when silent) and shares its
channel with the user's publishes. It is made in one bounded attempt, and so are connections for other uses: kombu's own
ways try again for seconds, or without end.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection, Producer
from kombu.exceptions import OperationalError

from ...model.logger import logger
from .. import configuration
from ..patches.connections import keep_client
from . import rabbitmq

T = TypeVar("T")

ATTEMPT_S = 1.0
PAUSE_S = (1.0, 5.0)
"""After a failure this process leaves the broker alone for a random time between these."""

WARN_S = 60.0
"""How often a process says that the broker is away: an outage of an hour is not a thousand warnings."""


class BrokerConnection:
    """Opens at its first use and again after each failure.

    Call `reset_after_fork` and hold the lock while you use it; `ask` does both.
    """

    def __init__(self, app: Celery) -> None:
        self.lock = threading.RLock()  # a continuation may make a job, whose doorbell is published within
        self.declared: set[str] = set()
        """Queues of ordinary tasks that were declared over it."""
        self._app = app
        self._pid = os.getpid()
        self._producer: Producer | None = None
        self._paused_until = float("-inf")
        self._warned_at = float("-inf")
        self._refusing: dict[str, float] = {}
        """Queues that took no message though the broker is there, and until when they are passed over."""

    @cached_property
    def family(self) -> str:
        """The kind of broker by kombu's name: "redis", "amqp"."""
        return configuration.broker_family(self._app)

    @property
    def ready(self) -> bool:
        """Whether the pause after the last failure is over."""
        return time.monotonic() >= self._paused_until

    @property
    def is_open(self) -> bool:
        """Whether it was opened; the broker may have closed it since."""
        return self._producer is not None

    def open(self) -> Producer:
        """Return what publishes over it, which opens it if need be."""
        if self._producer is None:
            self.declared = set()
            kind = rabbitmq.ConfirmedProducer if self.family == "amqp" else Producer
            self._producer = kind(self._connect())
        return self._producer

    def ask(self, question: Callable[[Any], T]) -> T | None:
        """Ask the broker something; None if it does not answer, which begins a pause, or not this question."""
        self.reset_after_fork()
        with self.lock:
            if not self.ready:
                return None
            try:
                return question(self.open().channel)
            except BaseException as error:
                self.reraise_interrupts(error)
                if self.broke_with(error):
                    self.pause(error)
                else:
                    logger.info("The broker does not answer (%s: %s)", type(error).__name__, error)
                return None

    def close(self) -> None:
        """Close it; the next use opens another."""
        self.reset_after_fork()
        with self.lock:
            self.drop()

    def drop(self) -> None:
        """Let go of it without a word."""
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                if self.family == "amqp":
                    producer.hang_up()
                else:
                    transport = producer.channel.connection
                    transport.close_connection(transport)
            except Exception as closing:
                logger.debug("Closing the broker connection failed: %s", closing)

    def _connect(self) -> Any:
        """Open a channel in one attempt."""
        connection = connection_to(self._app, ATTEMPT_S)
        connection.transport_options.pop("confirm_publish", None)  # py-amqp would wait after each message of a batch
        made = establish(connection, ATTEMPT_S)
        try:
            channel = connection.transport.create_channel(made)
        except BaseException:
            if self.family == "amqp":
                made.collect()
            raise
        if self.family == "redis":
            keep_client(channel)
        return channel

    # -- failures ------------------------------------------------------------------------------------------------

    def reraise_interrupts(self, error: BaseException) -> None:
        """Raise again what is meant for the caller, and struck here: its time limit, or the end of its greenlet.

        Half a message may be written, so the connection is given up; the sweeper publishes it.
        """
        if not isinstance(error, Exception) or isinstance(error, SoftTimeLimitExceeded):
            self.drop()
            raise error

    def broke_with(self, error: BaseException) -> bool:
        """Tell whether it was an error of the connection, or it could not even be opened."""
        if self._producer is None:
            return True
        if isinstance(error, OperationalError):  # what Celery makes of an error of the transport
            error = error.__cause__ or error
        # kombu counts KeyError among errors of its connections: that of a queue which is not declared.
        return isinstance(error, self._connection_errors) and not isinstance(error, KeyError)

    def is_stale(self, error: BaseException, reused: bool) -> bool:
        """Tell whether a connection that was there before turns out to be closed, as after a restart of RabbitMQ.

        After a silence nothing more is tried: this caller has waited long enough. A Redis client connects again by
        itself.
        """
        broken = isinstance(error, self._connection_errors) and not isinstance(error, TimeoutError)
        return reused and broken and self.family == "amqp"

    def pause(self, error: BaseException) -> None:
        """Leave the broker alone for a while: it is away."""
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
        self.drop()

    def pass_over(self, queue: str, error: BaseException) -> None:
        """Leave one queue alone for a while: it is not declared, or something else has its name."""
        self._refusing[queue] = time.monotonic() + PAUSE_S[1]
        logger.warning(
            "Queue %r did not take a message (%s: %s); its messages go out later.", queue, type(error).__name__, error
        )
        self.drop()  # with AMQP the channel is gone after such an error

    def passes_over(self, queue: str) -> bool:
        """Tell whether a queue is left alone just now."""
        return self._refusing.get(queue, 0.0) > time.monotonic()

    @cached_property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        return configuration.broker_errors(self._app)

    # -- forks ---------------------------------------------------------------------------------------------------

    def reset_after_fork(self) -> None:
        """In a child of the process that has opened it: leave that one alone, and begin anew."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.lock = threading.RLock()
            _inherited.append(self._producer)  # the parent's: not even its destructor may speak on that socket
            self._producer = None


_inherited: list[Any] = []


def connection_to(app: Celery, seconds: float, url: str | None = None) -> Connection:
    """Return a connection for `establish` to the app's broker, or to that of its nodes which has this URL."""
    options = dict(app.conf.broker_transport_options)
    if configuration.broker_family(app) == "redis":
        options.update(socket_timeout=seconds, socket_connect_timeout=seconds, retry_on_timeout=False)
    return app.connection_for_write(url, transport_options=options, connect_timeout=seconds)


def establish(connection: Connection, seconds: float) -> Any:
    """Connect, and return the transport's own connection, on which nothing waits for longer than `seconds`."""
    if connection.transport.driver_type == "postgres":
        connection.transport.link.answer_s = seconds
    made = connection.transport.establish_connection()
    if connection.transport.driver_type == "amqp":
        # py-amqp's own `read_timeout` bounds nothing: it reads again after it. Python's timeout of the socket does.
        made.transport.sock.settimeout(seconds)
    return made


@contextmanager
def established(connection: Connection, seconds: float) -> Iterator[Any]:
    """Connect for the block, as `establish` does."""
    made = establish(connection, seconds)
    try:
        yield made
    finally:
        connection.transport.close_connection(made)

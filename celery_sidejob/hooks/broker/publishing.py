"""Giving messages to the broker: one bounded attempt, then a pause for the whole process.

The attempt is bounded and the pause kept by a connection of our own (`hooks/broker/connection.py`). The messages are
durable rows, so giving up loses nothing. On RabbitMQ a message counts as published when the broker has confirmed that a
queue has it (`hooks/broker/rabbitmq.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from celery import Celery
from celery.canvas import maybe_signature
from kombu import Producer
from kombu.utils.json import dumps as kombu_dumps
from kombu.utils.json import loads as kombu_loads

from ...model.crash_points import reach
from ...model.durable import Message
from ...model.errors import InvalidValueError, SettingsError
from ...model.logger import log_row_error, logger
from ...model.messages import FORMAT, Continuation, Doorbell
from ...model.protocols import Publication, Refused
from ..messages import doorbell, kept_message
from ..messages.carried import NewerFormatError, check_sendable, is_of_the_message, is_unsendable, readable
from .connection import ATTEMPT_S, BrokerConnection

TOGETHER = 500
"""How many messages are given to the broker at once."""

INLINE: ContextVar[set[int] | None] = ContextVar("celery_sidejob_inline", default=None)
"""In eager mode: the jobs that were asked for, which are run right here, so that no worker is to be told of them."""


class CeleryPublisher:
    """Publishes doorbells, continuations and the messages of ordinary tasks of one app."""

    def __init__(self, app: Celery, connection: BrokerConnection, run_here: Callable[[set[int]], None]) -> None:
        self._app = app
        self._connection = connection
        self._run_here = run_here

    def publish(self, messages: Sequence[Publication], *, refused: Refused | None = None) -> Sequence[Publication]:
        """Publish in order until the broker fails, and return what it took; a queue that refuses is passed over.

        `refused` is given those that no queue will ever take.
        """
        connection = self._connection
        connection.reset_after_fork()
        sent: list[Publication] = []
        ordinary = [message for message in messages if isinstance(message, Message)]
        if len(ordinary) < len(messages):
            messages, sent = self._for_others(messages)
        if not messages or not connection.ready:
            return sent
        with connection.lock:
            calls = [message for message in messages if not isinstance(message, Continuation)]
            if len(calls) == len(messages) > 1:
                return sent + self._publish_together(calls, refused)
            return sent + self._publish_each(messages, refused)

    def _for_others(self, messages: Sequence[Publication]) -> tuple[Sequence[Publication], list[Publication]]:
        """Do in this process what eager mode does; returns the messages left for workers, and those done here."""
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

    def ring(self, messages: Sequence[Doorbell | Message]) -> None:
        """Wake the workers for messages whose references are in the broker, or run them here in eager mode."""
        left, _ = self._for_others(messages)
        self.ring_queues(list(dict.fromkeys(message.queue for message in left)))
        if self._app.conf.task_send_sent_event:
            for message in left:
                if isinstance(message, Doorbell):
                    self.announce(partial(doorbell.announce_sent, self._app, message))

    def ring_queues(self, queues: Sequence[str]) -> None:
        """Wake the workers of queues; see the protocol."""

        def ring(channel: Any) -> None:
            for queue in queues:
                channel.ring(queue)

        if queues:
            self._connection.ask(ring)

    def to_own_queue(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return those that go to their own queue, with their priorities; see the protocol."""
        found = []
        for message in messages:
            with suppress(InvalidValueError, NewerFormatError):
                own = kept_message.to_own_queue(message)
                found += [own] if own is not None else []
        return found

    def check_sendable(self, what: str, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        """Raise InvalidValueError for headers and properties that the app's broker cannot carry."""
        with suppress(SettingsError):  # the broker_url cannot be read: the publication says so
            check_sendable(what, self._connection.family, headers, properties)

    def _publish_together(self, messages: Sequence[Message | Doorbell], refused: Refused | None) -> list[Publication]:
        """Give the broker messages of ordinary tasks and doorbells, those of a page at once.

        A page that it did not take so is given one by one, to find out which it does not want: copies do no harm.
        """
        connection = self._connection
        sent: list[Publication] = []
        for first in range(0, len(messages), TOGETHER):
            if not connection.ready:  # another thread has found out meanwhile
                break
            whole = messages[first : first + TOGETHER]
            page = [message for message in whole if not connection.passes_over(message.queue)]
            reused = connection.is_open
            try:
                reach("publish-together:before")
                if not self._send_together(page):
                    sent += self._publish_each(page, refused)
                    continue
                reach("publish-together:after")
                sent += page
            except BaseException as error:
                connection.reraise_interrupts(error)
                cause = error.__cause__ or error
                if connection.broke_with(cause) and not connection.is_stale(cause, reused):
                    connection.pause(error)
                    break
                connection.drop()
                sent += self._publish_each(page, refused)
        return sent

    def _publish_each(self, messages: Sequence[Publication], refused: Refused | None) -> list[Publication]:
        connection = self._connection
        sent: list[Publication] = []
        for message in messages:
            if not connection.ready:
                break
            if connection.passes_over(message.queue):
                continue
            try:
                reach("publish:before")
                self._send_anew_if_stale(message)
                reach("publish:after")
            except BaseException as error:
                connection.reraise_interrupts(error)
                self._judge_failure(message, error, refused)
            else:
                sent.append(message)
        return sent

    def _judge_failure(self, message: Publication, error: BaseException, refused: Refused | None) -> None:
        """Find out whom a failed publication concerns: the broker, the message alone, or its queue."""
        connection = self._connection
        if connection.broke_with(error):
            connection.pause(error)
        elif is_unsendable(message, error):
            self._refuse(message, error, refused)
        elif is_of_the_message(message, error):
            log_row_error(message.task_id, "A message cannot be published; it is tried again: %s", message.task_id)
        else:
            connection.pass_over(message.queue, error)

    def _refuse(self, message: Publication, error: BaseException, refused: Refused | None) -> None:
        if self._connection.family == "amqp":
            self._connection.drop()  # RabbitMQ closes the channel with such an answer
        logger.warning("No queue takes the message of %s: %s", message.task_id, error)
        if refused is not None:
            refused.append((message, error))

    def close(self) -> None:
        """Let go of the connection; the next publish opens another."""
        self._connection.close()

    def announce(self, send: Callable[[Producer], Any]) -> None:
        """Send a monitoring event, if the broker is there."""
        self._connection.ask(lambda channel: send(self._connection.open()))

    # ------------------------------------------------------------------------------------------------------------

    def _send_anew_if_stale(self, message: Publication) -> None:
        """Send; once more on a new connection where the one we had turns out to be closed, as after a restart."""
        reused = self._connection.is_open
        try:
            self._send(message)
        except Exception as error:
            if not self._connection.is_stale(error, reused):
                raise
            self._connection.drop()
            self._send(message)

    def _send_together(self, messages: Sequence[Message | Doorbell]) -> bool:
        """Send messages at once, and wait for the answers; False where that cannot be done, and nothing was sent."""
        producer = self._connection.open()
        if not hasattr(producer, "batch"):  # which is of kombu 5.7
            return False
        with producer.batch(max_size=TOGETHER):
            for message in messages:
                self._send_call(message, producer)
        for message in messages:
            if isinstance(message, Doorbell):
                doorbell.announce_sent(self._app, message, producer)
        return True

    def _send(self, message: Publication) -> None:
        producer = self._connection.open()
        if isinstance(message, Continuation):
            send_continuation(self._app, message, producer=producer, retry=False)
            return
        self._send_call(message, producer)
        if isinstance(message, Doorbell):
            doorbell.announce_sent(self._app, message, producer)

    def _send_call(self, message: Message | Doorbell, producer: Producer) -> None:
        connection = self._connection
        if isinstance(message, Doorbell):
            doorbell.publish(self._app, producer, message, family=connection.family, timeout=ATTEMPT_S)
            return
        # A message that RabbitMQ returns is declared for anew.
        declared = connection.declared if connection.family != "amqp" else set()
        kept_message.publish(self._app, producer, message, declared=declared, timeout=ATTEMPT_S)

    def _continue_here(self, continuations: Sequence[Continuation]) -> list[Continuation]:
        """In eager mode: run callbacks and the rest of chains in this process, without a broker."""
        done: list[Continuation] = []
        for one in continuations:
            try:
                send_continuation(self._app, one)
            except Exception:
                log_row_error(one.task_id, "A continuation failed; it is tried again: %s", one.task_id)
            else:
                done.append(one)
        return done


def continuation_text(signature: Any, args: Sequence[Any], options: dict[str, Any]) -> str:
    """Return a continuation as text: the signature, the arguments that precede its own, and its options."""
    return str(kombu_dumps({"v": FORMAT, "signature": dict(signature), "args": readable(args), "options": options}))


def send_continuation(app: Celery, continuation: Continuation, **how: Any) -> None:
    """Send a callback or the rest of a chain, as a message; for a sidejob task, make a job.

    Its task id was fixed when the asking ended, so that a repetition is recognised as one.
    """
    try:
        kept = kombu_loads(continuation.publication)
        signature, args, options = maybe_signature(kept["signature"], app=app), tuple(kept["args"]), kept["options"]
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise InvalidValueError(f"it cannot be read: {type(error).__name__}: {error}") from error
    signature.apply_async(args, task_id=continuation.task_id, **how, **options)

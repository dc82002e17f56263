"""A channel as a consumer in Redis: its fetched messages are recorded under its name, and a heart beats for it."""

from __future__ import annotations

import os
from functools import partial
from time import monotonic
from typing import Any

from kombu.log import get_logger
from redis.exceptions import ConnectionError

from ...model.native import new_process_name
from ..quarantine import holds, running_tags, waiting_tags
from .heart import Waits
from .records import parted, tag_of, tokens_of

logger = get_logger(__name__)


class Consumer:
    """The consumer of one channel; another one after a lost answer, whose messages are given back.

    `waits` returns the queues that the channel waits for, each with its lists.
    """

    def __init__(self, channel: Any, waits: Waits) -> None:
        self._channel = channel
        self._waits = waits
        self._pid: int | None = None
        self._heart: Any = None
        self.name: str | None = None
        """Its name; None until it fetches."""
        self._former: tuple[str, ...] = ()
        self._next_look_at = 0.0
        self._was_silent = False

    def registered(self, *, records: bool) -> str:
        """Return its name; if it `records` its fetches, a heart beats for it."""
        pid = os.getpid()
        if self._pid != pid:
            self._former = ()
        if self.name is None or self._pid != pid:
            self._pid, self._heart = pid, None
            self.name = new_process_name()
        if self._heart is None and records:
            self._heart = self._channel.connection.heart_for(self._channel)
            self._heart.watch(self.name, self._waits, self.note_silence, partial(_unbegun, self.name))
        return self.name

    def has_fetched(self, name: str) -> None:
        """Note that Redis has executed a fetch under this name."""
        if self._heart is not None:
            self._heart.registered(name)

    def renew(self) -> None:
        """Become another consumer: an answer was lost, so the record may contain messages that never arrived here."""
        if self.name is not None and self._heart is not None:
            self._former += (self.name,)
        self.name = None
        self._next_look_at = 0.0

    def give_back_unheard(self) -> None:
        """Give back messages in the records of this channel's former names that never arrived.

        This repeats while messages under those names are in progress, because a fetch may be executed late.
        """
        if not self._former or monotonic() < self._next_look_at:
            return
        channel, records = self._channel, self._channel.records
        self._next_look_at = monotonic() + channel.consumer_timeout
        channel.acknowledgements.settle()
        for name in self._former:
            delivered = list(channel.qos._delivered)
            unheard = set(records.tokens(name)) - tokens_of(name, delivered)
            if unheard:
                records.give_back(name, unheard)
            if not tokens_of(name, [tag for tag in delivered if holds(channel.qos, tag)]):
                self._former = tuple(one for one in self._former if one != name)
                self._heart.forget(name)
                records.leave(name)

    def leave(self) -> None:
        """Give back all messages of this channel, in their order, and stop being a consumer."""
        if self._pid != os.getpid():
            return  # a forked copy has no messages
        channel = self._channel
        leaving = [*self._former, *([self.name] if self.name else [])]
        self.name, self._former = None, ()
        for name in leaving if self._heart is not None else ():  # without a heart nothing was recorded
            self._heart.forget(name)
            try:
                # Otherwise finished messages would be given back. After a longer wait, others have declared us dead.
                channel.acknowledgements.settle(within_s=channel.consumer_timeout)
                channel.records.leave(name, begun=tokens_of(name, running_tags()))
            except (*channel.connection_errors, channel.ResponseError) as error:
                logger.warning(
                    "The messages of %s could not be given back; other workers will recover them: %s", name, error
                )
        channel.acknowledgements.close()

    # -- the consequences of silence -------------------------------------------------------------------------------

    def note_silence(self) -> None:
        """Make the next fetch check first whether messages were taken away; other threads call this too."""
        self._was_silent = True

    def check_silence(self) -> None:
        """Raise ConnectionError if we were declared dead and our messages were taken away.

        So the application learns of it, as with RabbitMQ. A Celery worker then drops messages that it has not begun,
        cancels tasks if `worker_cancel_long_running_tasks_on_connection_loss` says so, and connects again.
        """
        if not self._was_silent:
            return
        self._was_silent = False
        channel = self._channel
        held = {tag: one for tag, one in list(channel.qos._delivered.items()) if holds(channel.qos, tag)}
        names = {name for name, _ in map(parted, held) if name}
        ours = {tag_of(name, token) for name in names for token in channel.records.tokens(name)}
        taken = [message for tag, message in held.items() if parted(tag)[0] and tag not in ours]
        for message in taken:
            logger.warning(
                "%s[%s] was taken from this worker, which was silent for too long, and goes to another one: if it has "
                "begun here, it runs twice",
                message.headers.get("task"),
                message.headers.get("id"),
            )
        if taken:
            raise ConnectionError(f"{len(taken)} messages were taken from this worker, which was declared dead")


def _unbegun(consumer: str) -> set[str]:
    """Return the tokens of messages that a consumer holds and has not begun."""
    return tokens_of(consumer, waiting_tags())

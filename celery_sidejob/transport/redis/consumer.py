"""A channel as a consumer in Redis, and the heart that beats for the consumers of one transport.

The fetched messages of a consumer are recorded under its name. The heart reports that it lives, and recovers the
messages of dead consumers. It is a thread of the operating system, even if gevent has replaced Python's threads:
neither a task of the pool solo nor a computing greenlet stops its beat. (With eventlet it is a green thread, like all
threads there.) It has its own connection. Only Redis' clock counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from logging import INFO, WARNING
from time import monotonic
from typing import Any

from kombu.log import get_logger
from redis.exceptions import ConnectionError, RedisError

from ...model import native
from ..pulse import Pulse
from ..quarantine import holds, running_tags, waiting_tags
from .records import BELL_MS, Records, parted, tag_of, tokens_of
from .scripts import BEAT, WAIT

logger = get_logger(__name__)

BEATS = 3
"""How many beats fit into the silence after which a consumer counts as dead."""
CLAIM_MS = 5_000
"""Milliseconds for which other hearts leave a dead consumer to the heart that found it, whose process may die as well.
"""
AT_ONCE = 5
"""The most dead consumers that one beat recovers, so that other workers recover some too."""
DEAD_LIST_EVERY_S = 3600.0
"""Seconds between two trims of the dead list, besides those after each recovery."""
RINGS_AT_ONCE = 1000
"""The most queues for which one beat checks whether to ring; the next beats check the others."""
SILENT = (
    "This consumer (%s) was silent for more than %g s and was declared dead: others have its messages now, and tasks "
    "in progress here run twice"
)
EMPTIED = (
    "Redis was emptied (FLUSHALL, FLUSHDB), or has restarted without its data: it does not know this consumer (%s) any "
    "more. Jobs and durable tasks are published again from the store; messages of other tasks that waited in Redis are "
    "gone. Tasks in progress here go on"
)

Unbegun = Callable[[], set[str]]
"""Returns the tokens of messages that a consumer holds and has not begun."""
Waits = Callable[[], Iterable[tuple[str, list[str]]]]
"""Returns the queues that a consumer waits for now, each with the keys of its lists."""


class Consumer:
    """The consumer of one channel; another one after a lost answer, whose messages are given back."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
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
            self.name = native.new_process_name()
        if self._heart is None and records:
            self._heart = self._channel.connection.heart_for(self._channel)
            self._heart.watch(self.name, self._channel.waited_for, self.note_silence, partial(_unbegun, self.name))
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


# -- its heart ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watched:
    """A consumer for which a heart beats."""

    waits: Waits
    was_silent: Callable[[], None]
    """Tells it that it may have been declared dead."""
    unbegun: Unbegun
    noted: set[str] = field(default_factory=set)
    """The tokens of messages that have not begun, as last written to Redis."""
    is_registered: bool = False
    """Whether a fetch has registered it: from then on its absence means that it was declared dead."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings of one beat."""

    lost: tuple[str, ...] = ()
    """Our consumers that were declared dead."""
    recovered: int = 0
    """How many messages of dead consumers were given back."""


class Heart:
    """Beats for the consumers of one transport, `BEATS` times in the time after which they count as dead.

    It stops beating for them while the consuming thread is stuck.
    """

    def __init__(
        self, records: Records, *, timeout_s: float, pulse: Pulse, bound_dead_list: Callable[[], object]
    ) -> None:
        """`bound_dead_list` trims the dead list; the heart calls it now and then."""
        self._client, self._keys = records.client, records.keys
        self._records = records
        self.timeout_s = timeout_s
        self._pulse = pulse
        self._bound_dead_list = bound_dead_list
        self._consumers: dict[str, Watched] = {}
        self._beat_at = monotonic()
        self._era: bytes | None = None
        self._stop = native.Event()
        self._pid: int | None = None
        self._beats_well = True
        self._next_ring = 0
        self._look_at_dead_at = 0.0

    def watch(self, consumer: str, waits: Waits, was_silent: Callable[[], None], unbegun: Unbegun = set) -> None:
        """Beat for a consumer that is about to fetch, and tell it if it may have been declared dead."""
        if self._pid not in (None, os.getpid()):  # forked: the others' hearts beat in the parent
            self._consumers.clear()
        self._consumers[consumer] = Watched(waits, was_silent, unbegun)
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._stop = native.Event()
            native.Thread(self._run, name="sidejob-transport-heart").start()

    def registered(self, consumer: str) -> None:
        """Note that a fetch has registered a consumer: from now on its absence means that it was declared dead."""
        watched = self._consumers.get(consumer)
        if watched is not None:
            watched.is_registered = True

    def forget(self, consumer: str) -> None:
        """Stop beating for a consumer; the thread ends with the last consumer."""
        self._consumers.pop(consumer, None)
        if not self._consumers and self._pid == os.getpid():
            self._pid = None
            self._stop.set()

    def beat(self) -> None:
        """Beat at once, for a thread that was stuck: consumers of ours that were declared dead learn of it now."""
        self._beat(0)

    def run_once(self) -> Report:
        """Beat, and recover dead consumers; repeat at once while more remain."""
        recovered = 0
        lost: tuple[str, ...] = ()
        while True:
            missing, dead = self._beat(AT_ONCE)
            lost += tuple(missing)
            for consumer in dead:
                recovered += self._recover(consumer)
            if len(dead) < AT_ONCE:
                self._note_unbegun()
                self._look_at_dead_list(now=recovered > 0)
                return Report(lost, recovered)

    def _note_unbegun(self) -> None:
        """Tell Redis which messages have not begun: a death is charged only to the others."""
        for consumer, watched in list(self._consumers.items()):
            unbegun = watched.unbegun()
            new, gone = unbegun - watched.noted, watched.noted - unbegun
            if new or gone:
                keys = [self._keys.consumers, self._keys.waiting(consumer)]
                if WAIT.run(self._client, keys, [consumer, len(new), *new, *gone]):
                    watched.noted = unbegun

    def _look_at_dead_list(self, *, now: bool) -> None:
        if now or monotonic() >= self._look_at_dead_at:
            self._look_at_dead_at = monotonic() + DEAD_LIST_EVERY_S
            self._bound_dead_list()

    def _recover(self, consumer: str) -> int:
        try:
            count = self._records.recover(consumer, after_page=self._beat_if_due)
        except (RedisError, OSError):
            raise
        except Exception:  # it must not delay the other consumers
            logger.exception("What %s had could not be recovered", consumer)
            return 0
        logger.log(WARNING if count else INFO, "Recovered %d messages of %s, which is dead", count, consumer)
        return count

    def _beat_if_due(self) -> None:
        """Beat in the middle of long work; otherwise others declare this process dead, and then their recoverers."""
        if monotonic() - self._beat_at > self.timeout_s / BEATS:
            self._beat(0)

    def _beat(self, at_most: int) -> tuple[list[str], list[str]]:
        """Beat; return our missing consumers, which are notified, and dead consumers that we may recover now."""
        missing, dead, era = self._ask_redis(at_most)
        was_emptied, self._era = self._era not in (None, era), era
        # A consumer that beats again in the middle of its recovery is not missing, and keeps its remaining messages.
        late = monotonic() - self._beat_at > self.timeout_s
        self._beat_at = monotonic()
        here = dict(self._consumers)  # otherwise it has left since then
        for consumer in here if late else here.keys() & missing:
            here[consumer].was_silent()
        for consumer in missing:
            if consumer in here:
                here[consumer].is_registered = False  # until it fetches again
                logger.warning(*((EMPTIED, consumer) if was_emptied else (SILENT, consumer, self.timeout_s)))
        return missing, dead

    def _ask_redis(self, at_most: int) -> tuple[list[str], list[str], bytes]:
        waited: dict[str, list[str]] = {}
        consumers = list(self._consumers.items())
        for _, watched in consumers:
            waited.update(watched.waits())
        if len(waited) > RINGS_AT_ONCE:
            first = self._next_ring if self._next_ring < len(waited) else 0
            self._next_ring = first + RINGS_AT_ONCE
            waited = dict(islice(waited.items(), first, self._next_ring))
        steps = len(next(iter(waited.values()))) if waited else 0
        keys = self._keys
        lists = [key for of_queue in waited.values() for key in of_queue]
        ours = [] if self._pulse.stands_still() else [name for name, watched in consumers if watched.is_registered]
        options = [round(self.timeout_s * 1000), CLAIM_MS, at_most, BELL_MS, len(waited), steps, os.urandom(8).hex()]
        names = [keys.consumers, keys.recovering, keys.era, *keys.bells(waited), *lists]
        missing, dead, era = BEAT.run(self._client, names, [*options, *ours])
        return [one.decode() for one in missing], [one.decode() for one in dead], era

    def _run(self) -> None:
        stop = self._stop
        while not stop.is_set():
            try:
                self.run_once()
            except (RedisError, OSError) as error:
                # Messages of silent consumers must go to other workers: perhaps only our network is down.
                if self._beats_well:
                    logger.warning("The heart of this process cannot reach Redis and keeps trying: %s", error)
                self._beats_well = False
                stop.wait(self.timeout_s / 10)
                continue
            except Exception:  # others would recover all our messages
                logger.exception("The heart of this process has stumbled, and goes on")
            if not self._beats_well:
                logger.info("The heart of this process can reach Redis again")
            self._beats_well = True
            stop.wait(self.timeout_s / BEATS)
        if self._stop is stop:  # otherwise another thread has started with the same connections
            self._client.connection_pool.disconnect()

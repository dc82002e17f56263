"""The thread that reports this process' consumers alive, and recovers the messages of dead ones.

A thread of the operating system, even if gevent has replaced Python's threads: neither a task of the pool solo nor a
computing greenlet stops its beat. (With eventlet it is a green thread, like all threads there.) It has its own
connection. Only Redis' clock counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from logging import INFO, WARNING
from time import monotonic
from typing import Any

from kombu.log import get_logger
from redis.exceptions import RedisError

from ...model import native
from ..pulse import Pulse
from .keys import Keys
from .records import BELL_MS, Records
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
        self,
        client: Any,
        keys: Keys,
        records: Records,
        *,
        timeout_s: float,
        pulse: Pulse,
        bound_dead_list: Callable[[], object] = lambda: None,
    ) -> None:
        """`bound_dead_list` trims the dead list; the heart calls it now and then."""
        self._client = client
        self._keys = keys
        self._records = records
        self.timeout_s = timeout_s
        self._pulse = pulse
        self._bound_dead_list = bound_dead_list
        self._consumers: dict[str, Waits] = {}
        self._told: dict[str, Callable[[], None]] = {}
        self._unbegun: dict[str, Unbegun] = {}
        self._noted: dict[str, set[str]] = {}
        """The tokens of messages that have not begun, as last written to Redis."""
        self._beat_at = monotonic()
        self._era: bytes | None = None
        self._registered: set[str] = set()
        self._stop = native.Event()
        self._pid: int | None = None
        self._beats_well = True
        self._next_ring = 0
        self._look_at_dead_at = 0.0

    def watch(self, consumer: str, waits: Waits, was_silent: Callable[[], None], unbegun: Unbegun = set) -> None:
        """Beat for a consumer that is about to fetch, and tell it if it may have been declared dead."""
        if self._pid not in (None, os.getpid()):  # forked: the others' hearts beat in the parent
            for ours in (self._consumers, self._told, self._registered, self._unbegun, self._noted):
                ours.clear()
        self._consumers[consumer] = waits
        self._told[consumer] = was_silent
        self._unbegun[consumer] = unbegun
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._stop = native.Event()
            native.Thread(self._run, name="sidejob-transport-heart").start()

    def registered(self, consumer: str) -> None:
        """Note that a fetch has registered a consumer: from now on its absence means that it was declared dead."""
        self._registered.add(consumer)

    def forget(self, consumer: str) -> None:
        """Stop beating for a consumer; the thread ends with the last consumer."""
        self._registered.discard(consumer)
        self._consumers.pop(consumer, None)
        for ours in (self._told, self._unbegun, self._noted):
            ours.pop(consumer, None)
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
        for consumer, ask in list(self._unbegun.items()):
            unbegun, noted = ask(), self._noted.get(consumer, set())
            new, gone = unbegun - noted, noted - unbegun
            if new or gone:
                keys = [self._keys.consumers, self._keys.waiting(consumer)]
                if WAIT.run(self._client, keys, [consumer, len(new), *new, *gone]):
                    self._noted[consumer] = unbegun

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
        for tell in [self._told.get(one) for one in (list(self._told) if late else missing)]:
            if tell is not None:  # otherwise it has left since then
                tell()
        for consumer in missing:
            self._registered.discard(consumer)  # until it fetches again
            if consumer in self._consumers:
                logger.warning(*((EMPTIED, consumer) if was_emptied else (SILENT, consumer, self.timeout_s)))
        return missing, dead

    def _ask_redis(self, at_most: int) -> tuple[list[str], list[str], bytes]:
        waited: dict[str, list[str]] = {}
        for waits in list(self._consumers.values()):
            waited.update(waits())
        if len(waited) > RINGS_AT_ONCE:
            first = self._next_ring if self._next_ring < len(waited) else 0
            self._next_ring = first + RINGS_AT_ONCE
            waited = dict(islice(waited.items(), first, self._next_ring))
        steps = len(next(iter(waited.values()))) if waited else 0
        keys = self._keys
        lists = [key for of_queue in waited.values() for key in of_queue]
        fetching = [] if self._pulse.stands_still() else list(self._registered)
        ours = [consumer for consumer in fetching if consumer in self._consumers]
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

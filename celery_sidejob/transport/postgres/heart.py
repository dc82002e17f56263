"""The thread of a consuming connection: it beats, hears rings, and carries out ends of messages while no loop does.

It has a session of its own, on which it holds the lock that says that this process lives. It listens on the same
session, and wakes the loop by a pipe: the loop need not read from a socket that this thread uses. It is a thread of the
operating system, so neither a task of the pool solo nor a greenlet that computes stops it.
"""

from __future__ import annotations

import os
import random
import select
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from kombu.log import get_logger

from ...model import native
from ...store.broker import consumers, queues
from ...store.connection.own_executor import OwnExecutor
from . import broadcasts, topology
from .link import BINDINGS, DEATH, LOST, carry_out

if TYPE_CHECKING:
    from .transport import Transport

T = TypeVar("T")

logger = get_logger(__name__)

BEATS = 3
"""How many beats fit into the silence after which a consumer counts as dead."""
LONGEST_BEAT_S = 1.5
"""What lies between two beats at most: within this time others notice a consumer that was killed."""
LATE_S = 0.01
"""How long the end of a message waits for the loop before this thread carries it out."""
EXPIRY_S = 60.0
"""How often expired queues and old broadcasts are removed."""
USE_S = 3.0
"""How often the use of queues that expire is noted."""


class Heart:
    """The heart of one connection. `start` raises the connection's errors; later ones are in `error`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._link = transport.link
        self._silence_s = transport.silence_s
        self._beat_s = min(LONGEST_BEAT_S, self._silence_s / BEATS)
        self._lock = native.lock()
        self._rings: set[str] = set()
        self._stopping = False
        self._is_watching = False
        self._pid = os.getpid()
        self._wakes = native.Pipe()
        self.name = ""
        self.consumer = 0
        """The id under which this connection holds messages."""
        self.listens = False
        """Whether rings are heard: not through a proxy that pools transactions."""
        self.beaten_at = 0.0
        """When the last beat that was answered began: within the silence after it nobody takes what we hold."""
        self.error: BaseException | None = None
        """What has ended it: the connection must be given up."""
        self.wanted: frozenset[str] = frozenset()
        """Which rings are heard."""
        self._heard: Sequence[Any] = ()

    def start(self) -> None:
        """Register a consumer, and beat for it."""
        self.beaten_at = monotonic()
        executor = self._link.open_session()
        try:
            self.name = native.new_process_name()
            self.consumer = consumers.register(executor, self.name, silence_s=self._silence_s)
            self.listens = not executor.pooled
            if self.listens:
                consumers.lock(executor, self.consumer, self._link.schema)
                executor.listen([self._link.channel], lambda _, payload: self._hear(payload))
        except BaseException:
            executor.close()
            raise
        self._executor = executor
        broadcasts.begin_beats(self._link, self)
        native.Thread(self._run, name="sidejobpg-heart").start()

    @property
    def is_ours(self) -> bool:
        """Whether it beats in this process, not in that of which this one was forked."""
        return self._pid == os.getpid()

    def take_rings(self) -> set[str]:
        """Return what was rung since the last call."""
        if not self._rings:
            return set()
        with self._lock:
            rings, self._rings = self._rings, set()
        return rings

    def take_heard(self) -> Sequence[Any]:
        """Return the events that the last beat has read, once."""
        heard, self._heard = self._heard, ()
        return heard

    def wake(self) -> None:
        """Have it see whether there is something to be carried out."""
        if not self._is_watching:
            self._wakes.write()

    def stop(self) -> None:
        """End it; the consumer is removed, and the events are sent that are left, by whoever stops it."""
        self._stopping = True
        broadcasts.end_beats(self._link, self)
        if self.is_ours:
            self._wakes.write()

    # ------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self.listens:
            topology.hear(self._link.channel)
        try:
            self._go_on()
        except Exception as error:
            if not self._stopping:
                if not isinstance(error, (*LOST, DeclaredDead)):
                    logger.exception("The heart of this process has stumbled")
                self.error = error
                self._transport.wake()
        finally:
            broadcasts.end_beats(self._link, self)
            if self.listens:
                topology.hear_no_more(self._link.channel)
            self._executor.close()
            self._wakes.close()

    def _go_on(self) -> None:
        poll = native.poll()
        poll.register(self._executor.connection.fileno(), select.POLLIN)
        poll.register(self._wakes.fileno(), select.POLLIN)
        now = monotonic()
        beat, use, expire = self._beat, self._use, self._expire
        plan = {beat: now + self._beat_s, use: now + USE_S, expire: now + random.uniform(1, EXPIRY_S)}
        every_s = {beat: self._beat_s, use: USE_S, expire: EXPIRY_S}
        while not self._stopping:
            poll.poll(1000 * (LATE_S if self._is_watching else max(0.0, min(plan.values()) - monotonic())))
            self._wakes.drain()
            self._executor.take_in()
            self._is_watching = False  # before the look, so that who reports something after it wakes us
            self._is_watching = self._transport.end_late(self._transact)
            now = monotonic()
            for duty in [one for one, at in plan.items() if now >= at]:
                plan[duty] = now + every_s[duty]
                duty()

    def _transact(self, name: str, work: Callable[[OwnExecutor], T]) -> T:
        return carry_out(self._executor, name, work)

    def _hear(self, payload: str) -> None:
        if payload == BINDINGS:
            topology.note_change(self._link.channel)
        elif payload == DEATH or payload in self.wanted:
            with self._lock:
                is_news = payload not in self._rings
                self._rings.add(payload)
            if is_news:
                self._transport.wake()

    def _beat(self) -> None:
        if self._transport.pulse.stands_still():
            return
        began = monotonic()
        found = self._talk()
        if found.is_alive:
            self.beaten_at = began
        if found.heard:
            self._heard = found.heard
            self._transport.wake()
        if not found.is_alive:
            raise DeclaredDead(
                f"consumer {self.name} was silent for more than {self._silence_s:g} s, and others have its messages"
            )
        if found.dead:
            logger.warning("Dead consumers, whose messages others get: %s", ", ".join(found.dead))
            self._transact("ring", lambda executor: consumers.notify(executor, self._link.channel, DEATH))
            self._hear(DEATH)

    def _talk(self) -> consumers.Beaten:
        """Beat, and with the same statement send the events of this process and read those that it listens to."""
        consumer, schema = self.consumer, self._link.schema
        said, (since, exchanges) = broadcasts.take_events(self._link), self._transport.listens_to()
        if not said and not exchanges:
            return self._transact("beat", lambda executor: consumers.beat(executor, consumer, schema))
        try:
            return self._transact(
                "beat",
                lambda executor: consumers.beat_and_talk(
                    executor, consumer, schema, said=said, since=since, exchanges=exchanges
                ),
            )
        except BaseException:
            broadcasts.put_back_events(self._link, said)
            raise

    def _use(self) -> None:
        names = self._transport.expiring_queues()
        if names:
            self._transact("use", lambda executor: queues.use(executor, names))

    def _expire(self) -> None:
        topology.remove_expired(self._transact)
        self._transport.bound_dead_list(self._transact)


class DeclaredDead(Exception):
    """This consumer was declared dead."""

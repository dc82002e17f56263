"""The transport behind the URL `sidejobpg://`: its connections, and when there is a round of their turns.

A round looks at everything that there may be to do. It happens when the pipe was written to, in a worker by its event
loop, else in `drain_events`: by an acknowledgement, by a ring that the heart has heard, or by a timer. It never happens
in `on_tick`: what is done there with `call_soon` waits for the next poll to end, up to a second.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from math import inf
from time import monotonic
from typing import Any

import kombu
import psycopg
from kombu.log import get_logger
from kombu.transport import virtual

from ...model import native
from ...model.checks import SLIP, Form, is_number, is_seconds, is_text, nearest
from ...model.errors import SettingsError
from ...store.broker import broadcasts, consumers, messages, queues
from ..decoding import NotAMessageError, made
from ..pulse import Pulse
from . import bell, dead, rows
from .address import SCHEME, database_url, hide_password, is_alone, without_password
from .broker_channel import Channel as BrokerChannel
from .celery_worker import DRIVER, introduce
from .heart import BEATS, LATE_S, Declared, Heart, Pipe
from .link import LOST, Link, Run
from .topology import Topology

logger = get_logger(__name__)

if tuple(kombu.VERSION[:2]) < (5, 7):
    raise ImportError(f"sidejobpg:// needs kombu 5.7 or newer; this is {kombu.__version__}")

BACK_OFF_S = (0.01, 0.05, 0.25, 1.0, 1.0, 5.0)
"""When an idle consumer looks again, though nobody has rung: its sender may have died before the ring."""
DEAF_S = 0.05
"""When one looks that hears no rings: through a proxy that pools transactions."""
TOLD_S = 30.0
"""How often broadcasts are looked for that nobody has rung for."""
LONGEST_WAIT_S = 10.0
SETTLED_S = 2.0
"""After which time no broadcast with a smaller id appears any more: its sender was slow to commit."""

EVENTLET = (
    f"{SCHEME}:// cannot be consumed with eventlet, which is no longer maintained and which psycopg does not know: a "
    "statement would stop all its green threads. Use --pool=gevent or --pool=threads."
)
OPTIONS: Mapping[str, Form] = {
    "schema": ("the name of a schema", lambda value: is_text(value) and value != ""),
    "consumer_timeout": ("a number of seconds above 0", lambda value: is_seconds(value) and value > 0),
    "loop_timeout": (
        "a number of seconds above 0, or None", lambda value: value is None or (is_seconds(value) and value > 0),
    ),
    "synchronous_commit": ("'on' or 'off'", lambda value: value in ("on", "off")),
    "delivery_limit": ("a whole number above 0, or None", lambda value: value is None or is_number(value, least=1)),
    "dead_list_limit": ("a whole number above 0, or None", lambda value: value is None or is_number(value, least=1)),
    "dead_list_days": (
        "a number of days above 0, or None", lambda value: value is None or (is_seconds(value) and value > 0),
    ),
}  # fmt: skip
"""Our options, each with its values."""


class Transport(virtual.Transport):
    """kombu's transport on one Postgres database."""

    Channel = BrokerChannel
    compose: Callable[[Any], dict[str, Any] | None] | None = None
    """Returns kombu's message from a row of a turn that is a reference, or None if it leads to nothing any more.

    Without it the channels of this connection leave references to others.
    """
    can_parse_url = True
    polling_interval = None
    driver_type = DRIVER
    driver_name = "psycopg"
    implements = virtual.Transport.implements.extend(
        asynchronous=True, batch_publish=True, exchange_type=frozenset(["direct", "topic", "fanout"])
    )
    connection_errors = (*virtual.Transport.connection_errors, *LOST, OSError)

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        given = client.transport_options
        _check_options(given)
        hide_password(client)
        self.silence_s = float(given.get("consumer_timeout", 10.0))
        self.pulse = Pulse(given.get("loop_timeout", 30.0))
        self.has_loop = False
        """Whether Celery's event loop runs the turns."""
        self.listening: dict[str, list[tuple[str, Any]]] = {}
        """Queues that are told by broadcasts: the exchange, and the pattern of the routing keys (None: all)."""
        self._heart: Heart | None = None
        self._pipe: Pipe | None = None
        self._loop: Any = None
        self._timer: Any = None
        self._timer_at = inf
        self._look_at, self._due_at, self._step = 0.0, inf, 0
        self._told_at, self._events_at = 0.0, inf
        self._broadcast_ids: dict[int, float] = {}
        self._broadcast_since: int | None = None
        introduce()

    @cached_property
    def link(self) -> Link:
        """The connection over which statements run; SettingsError if the URL names no database."""
        given = self.client.transport_options
        return Link(
            database_url(self.client), given.get("schema", "sidejob"), direct_url=given.get("direct_url"),
            commits_late=given.get("synchronous_commit") == "off",
        )  # fmt: skip

    @cached_property
    def topology(self) -> Topology:
        """Queues and bindings."""
        return Topology(self.link)

    @property
    def delivery_limit(self) -> float:
        """How often a message may come back that had begun before it goes to the dead list."""
        limit = self.client.transport_options.get("delivery_limit", 20)
        return inf if limit is None else int(limit)

    def driver_version(self) -> str:
        """Return psycopg's version."""
        return psycopg.__version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL for people."""
        if is_alone(uri or ""):
            return f"{SCHEME}://"
        shown = database_url(self.client).replace("postgresql:", f"{SCHEME}:", 1)
        return shown if include_password else without_password(shown, mask)

    def establish_connection(self) -> Any:
        """Adds to kombu's: raises SchemaError unless there are tables of the broker that we may use."""
        try:
            self.link.run("read", lambda executor: queues.is_declared(executor, ""))
        except BaseException:
            self.link.close()
            raise
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        """Adds to kombu's: the consumer is gone, and with it the connections."""
        super().close_connection(connection)
        if self._loop is not None and self._pipe is not None:
            self._loop.remove(self._pipe.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.stop()
            if heart.is_ours:
                with suppress(*LOST):
                    self.link.run("leave", lambda executor: consumers.leave(executor, heart.consumer))
        self.link.close()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    # -- what channels ask ------------------------------------------------------------------------------------------

    @property
    def consumer(self) -> int:
        """The id under which this connection holds messages."""
        return self._heart.consumer if self._heart is not None else 0

    def beat(self) -> None:
        """Have a heart. Raises SettingsError under eventlet, which has no thread that waits beside its own."""
        if self._heart is not None and self._heart.is_ours:
            return
        if native.is_eventlet():
            raise SettingsError(EVENTLET)
        self._pipe = Pipe()
        heart = Heart(self.link, self, self.pulse, silence_s=self.silence_s)
        heart.start()
        self._heart = heart

    def mind_consumed(self) -> None:
        """Hear the rings of what is consumed now."""
        if self._heart is None:
            return
        names = [name for channel in self.channels for name in channel.consumed_queues]
        rings = [ring(name) for name in names for ring in (bell.of_queue, bell.of_return)]
        listened = [
            bell.of_exchange(exchange) if pattern is None else bell.of_events(exchange)
            for name in names
            for exchange, pattern in self.listening.get(name, ())
        ]
        self._heart.wanted = frozenset([*rings, *listened])
        self._step, self._look_at = 0, 0.0
        if listened and self._broadcast_since is None:
            self._broadcast_since = self.link.run("read", broadcasts.last)
        self.wake()

    def mind_turn(self, turn: messages.Turn) -> None:
        """Note what a turn has said of this consumer, and when the next message is due."""
        if not turn.is_alive:
            raise psycopg.OperationalError("this consumer was declared dead, and others have its messages")
        self._due_at = inf if turn.due_in_s is None else monotonic() + turn.due_in_s

    def check_alive(self) -> None:
        """Raise if we may have been declared dead: this process stood still, or its network did.

        A message that was fetched before then may have begun with another consumer.
        """
        heart = self._heart
        if heart is None or monotonic() - heart.beaten_at < self.silence_s:
            return
        found = self.link.run("beat", lambda executor: consumers.beat(executor, heart.consumer, self.link.schema))
        if not found.is_alive:
            raise psycopg.OperationalError("this worker was declared dead, and others have its messages")

    def listen(self, queue: str, exchange: str, pattern: Any) -> None:
        """Have a queue told what an exchange broadcasts."""
        told = self.listening.setdefault(queue, [])
        if (exchange, pattern) not in told:
            told.append((exchange, pattern))

    def listen_no_more(self, queue: str, exchange: str | None = None) -> None:
        """End that."""
        told = [one for one in self.listening.pop(queue, ()) if exchange is not None and one[0] != exchange]
        if told:
            self.listening[queue] = told

    # -- what the heart asks ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a turn soon; if the loop is busy, or was left for a warm stop, the heart sees to ends of messages."""
        if self._pipe is not None:
            self._pipe.write()
        if self._heart is not None:
            self._heart.wake()

    def end_late(self, run: Run) -> bool:
        """Carry out ends of messages that were reported a while ago, in the heart's thread; tell whether to go on."""
        channels = list(self.channels)
        for channel in channels:
            channel.end_late(LATE_S, run)
        return any(channel.is_busy for channel in channels)

    def expiring_queues(self) -> Sequence[str]:
        """Return the consumed queues that would expire, and whose use was not noted lately.

        Nobody looks up a queue that only hears what everybody is told: such a one may expire.
        """
        consumed = [name for channel in list(self.channels) for name in channel.consumed_queues]
        return list(self.topology.expiring(name for name in consumed if not self._only_hears_all(name)))

    def _only_hears_all(self, queue: str) -> bool:
        listened = self.listening.get(queue, ())
        return bool(listened) and all(pattern is None for _, pattern in listened)

    def bound_dead_list(self, run: Run) -> None:
        """Drop what the dead list keeps no longer, in the heart's thread."""
        given = self.client.transport_options
        dead.bound(run, limit=given.get("dead_list_limit", 10_000), days=given.get("dead_list_days", 90))

    # -- turns ------------------------------------------------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have Celery's event loop run the turns."""
        self.beat()
        assert self._pipe is not None
        self.has_loop, self._loop = True, loop
        self.pulse.tick()
        loop.add_reader(self._pipe.fileno(), self._on_readable)
        loop.call_repeatedly(min(1.0, self.silence_s / BEATS), self._come_round)
        self.wake()

    def drain_events(self, connection: Any, timeout: float | None = None, **options: Any) -> None:
        """Deliver what there is, at least one message; TimeoutError if none comes in time."""
        deadline = inf if timeout is None else monotonic() + timeout
        while not self._round():
            now = monotonic()
            if now >= deadline:
                raise TimeoutError("nothing came in time")
            files = [] if self._pipe is None else [self._pipe.fileno()]
            select.select(files, [], [], max(0.0, min(self._next_at(), deadline, now + LONGEST_WAIT_S) - now))

    def _on_readable(self) -> None:
        """Have a turn in the loop; then set the timer, which the loop minds before it waits again."""
        if self._round():
            self.wake()
        self._set_timer()

    def _set_timer(self) -> None:
        at = self._next_at()
        if self._loop is None or at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - monotonic()), self._on_timer) if at < inf else None

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, inf
        self.wake()

    def _come_round(self) -> None:
        """Note that the loop came round; after a long absence first see whether we were declared dead."""
        self.pulse.tick()
        self.check_alive()

    def _round(self) -> bool:
        """Do all that is to be done now; tell whether anything was delivered."""
        if self._pipe is not None:
            self._pipe.drain()
        rings = self._take_rings()
        now = monotonic()
        hears = self._heart is None or self._heart.listens
        is_time = now >= self._look_at
        if self._due_at <= now:
            self._promote()
        told = self._mind_broadcasts(rings, now, is_time=is_time and (not hears or now >= self._told_at + TOLD_S))
        delivered = False
        for channel in list(self.channels):
            if is_time:
                channel.look()
            self._mind_rings(channel, rings)
            delivered |= channel.turn()
        is_news = delivered or any(not bell.is_of_broadcast(ring) for ring in rings)
        if is_news:
            self._step = 0
        elif is_time:
            self._step = min(self._step + 1, len(BACK_OFF_S) - 1)
        if is_news or is_time:
            self._look_at = monotonic() + (BACK_OFF_S[self._step] if hears else min(DEAF_S, BACK_OFF_S[self._step]))
        return told or delivered

    def _mind_broadcasts(self, rings: set[str], now: float, *, is_time: bool) -> bool:
        """Deliver broadcasts at once that a fanout exchange has, events a while after the last look.

        Their senders do not ring for each: after a ring, and after a look that has found some, there is another look.
        """
        if self._broadcast_since is None:
            return False
        of_events = any(map(bell.is_of_events, rings))
        if of_events:
            self._events_at = min(self._events_at, max(now, self._told_at + bell.EVENTS_S))
        is_fanout = any(bell.is_of_broadcast(ring) and not bell.is_of_events(ring) for ring in rings)
        if not (is_time or is_fanout or now >= self._events_at):
            return False
        told, more = self._tell(), of_events or now < self._events_at < inf
        self._told_at = now
        self._events_at = now + bell.EVENTS_S if told or more else inf
        return told

    def _take_rings(self) -> set[str]:
        """Return what was rung; raise the error with which the heart has ended, as one of the connection."""
        if self._heart is None:
            return set()
        error = self._heart.error
        if error is not None:
            what = "was declared dead" if isinstance(error, Declared) else "has lost its connection"
            raise psycopg.OperationalError(f"this consumer {what}: {error}") from error
        return self._heart.take_rings()

    def _mind_rings(self, channel: Any, rings: set[str]) -> None:
        for queue in channel.fetched_queues:
            if bell.of_queue(queue) in rings:
                channel.look()
            if bell.DEATH in rings or bell.of_return(queue) in rings:
                channel.look_at_all()

    def _promote(self) -> None:
        """Make ready what is due."""
        self._due_at = inf
        due = self.link.run("promote", messages.promote)
        if len(due) == messages.PAGE:
            self._due_at = 0.0
        for queue in dict.fromkeys(due):
            bell.ring(self.link, bell.of_return(queue))
        for channel in self.channels:
            if not set(due).isdisjoint(channel.fetched_queues):
                channel.look_at_all()

    def _tell(self) -> bool:
        """Deliver broadcasts to the queues that are consumed here and listen to them."""
        consumed = {name for channel in self.channels for name in channel.consumed_queues}
        told = {queue: listened for queue, listened in self.listening.items() if queue in consumed}
        exchanges = sorted({exchange for listened in told.values() for exchange, _ in listened})
        if not exchanges:
            return False
        since, now = self._broadcast_since or 0, monotonic()
        found = self.link.run("read", lambda executor: broadcasts.since(executor, since, exchanges))
        delivered = False
        for row in found:
            if row.id in self._broadcast_ids:
                continue
            self._broadcast_ids[row.id] = now
            listening = [
                queue
                for queue, listened in told.items()
                if any(one == row.exchange and _matches(pattern, row.routing_key) for one, pattern in listened)
            ]
            delivered |= self._deliver_broadcast(row, listening)
        settled = [one for one, at in self._broadcast_ids.items() if now - at > SETTLED_S]
        if settled:
            self._broadcast_since = max(settled)
            self._broadcast_ids = {one: at for one, at in self._broadcast_ids.items() if one > self._broadcast_since}
        return delivered

    def _deliver_broadcast(self, row: Any, listening: Sequence[str]) -> bool:
        """Deliver a broadcast to these queues, unless it is no message; tell whether anybody got it."""
        callbacks = [self._callbacks[queue] for queue in listening if queue in self._callbacks]
        try:
            for callback in callbacks:
                callback(made(partial(rows.payload_of, row, f"broadcast-{row.id}")))
        except NotAMessageError as error:
            logger.warning("A broadcast of %s is left out: %s", row.exchange, error.reason)
            return False
        return bool(callbacks)

    def _next_at(self) -> float:
        """Return when the next turn is due, if nothing wakes us before."""
        at: float = min([self._look_at, self._due_at, self._events_at, *(channel.next_at for channel in self.channels)])
        return at


def _matches(pattern: Any, routing_key: str) -> bool:
    return pattern is None or bool(_TOPIC._match(pattern, routing_key))


_TOPIC = virtual.exchange.TopicExchange(None)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that make no sense, and names that nearly match one of ours; others belong to other transports."""
    for name in options.keys() - OPTIONS.keys():
        meant = nearest(name, OPTIONS, like=SLIP)
        if meant is not None:
            raise ValueError(f"{name} is not a transport option. Did you mean {meant}?")
    for name, (meaning, fits) in OPTIONS.items():
        if name in options and not fits(options[name]):
            raise ValueError(f"The transport option {name} is {meaning}, not {options[name]!r}.")

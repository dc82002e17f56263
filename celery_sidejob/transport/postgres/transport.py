"""The transport behind the URL `sidejobpg://`: its connections, and when their channels are polled.

A poll does everything that there may be to do. It happens when the pipe was written to, in a worker by its event
loop, else in `drain_events`: by an acknowledgement, by a ring that the heart has heard, or by a timer. It never happens
in `on_tick`: what is done there with `call_soon` waits for the next poll to end, up to a second.
"""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import inf
from time import monotonic
from typing import Any

import psycopg
from kombu.transport import virtual

from ...model import native
from ...model.checks import Form, is_text
from ...model.errors import SettingsError
from ...model.urls import SCHEME, database_url, hide_password, is_alone, without_password
from ...store.broker import consumers, messages, queues
from ..options import DEFAULTS, SHARED, check_options, require_kombu
from ..pulse import Pulse
from . import dead
from .acknowledgements import Outbox
from .broadcasts import Broadcasts, send_left
from .broker_channel import Channel as BrokerChannel
from .celery_worker import DRIVER, introduce
from .heart import BEATS, LATE_S, DeclaredDead, Heart
from .link import DEATH, LOST, Link, Run, is_of_broadcast, ring_of_queue, ring_of_return
from .topology import Topology

require_kombu(SCHEME)

BACK_OFF_S = (0.01, 0.05, 0.25, 1.0, 1.0, 5.0)
"""When an idle consumer looks again, though nobody has rung: its sender may have died before the ring."""
DEAF_S = 0.05
"""When one looks that hears no rings: through a proxy that pools transactions."""
LONGEST_WAIT_S = 10.0

EVENTLET = (
    f"{SCHEME}:// cannot be consumed with eventlet, which is no longer maintained and which psycopg does not know: a "
    "statement would stop all its green threads. Use --pool=gevent or --pool=threads."
)
OPTIONS: Mapping[str, Form] = {
    **SHARED,
    "schema": ("the name of a schema", lambda value: is_text(value) and value != ""),
    "synchronous_commit": ("'on' or 'off'", lambda value: value in ("on", "off")),
}
"""Our options, each with its values."""


class Transport(virtual.Transport):
    """kombu's transport on one Postgres database."""

    Channel = BrokerChannel
    outbox: Outbox | None = None
    """What the references of this connection lead to; without it its channels leave them to others."""
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
        check_options(client.transport_options, OPTIONS)
        self._options = given = {**DEFAULTS, **client.transport_options}
        hide_password(client)
        self.silence_s = float(given.get("consumer_timeout", 10.0))
        self.delivery_limit: int | None = given["delivery_limit"]
        """How often a message may come back that had begun before it goes to the dead list."""
        self.pulse = Pulse(given["loop_timeout"])
        self.has_loop = False
        """Whether Celery's event loop runs the polls."""
        self.broadcasts = Broadcasts(lambda: self.link, self._callbacks)
        self._heart: Heart | None = None
        self._pipe: native.Pipe | None = None
        self._loop: Any = None
        self._timer: Any = None
        self._timer_at = inf
        self._poll_at, self._due_at, self._step = 0.0, inf, 0
        introduce()

    @cached_property
    def link(self) -> Link:
        """The connection over which statements run; SettingsError if the URL names no database."""
        given = self.client.transport_options
        return Link(
            database_url(self.client),
            given.get("schema", "sidejob"),
            direct_url=given.get("direct_url"),
            commits_late=given.get("synchronous_commit") == "off",
        )

    @cached_property
    def topology(self) -> Topology:
        """Queues and bindings."""
        return Topology(self.link)

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
                    send_left(self.link)
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

    def start_heart(self) -> None:
        """Begin to beat, unless this connection does so. SettingsError under eventlet, which has no thread for it."""
        if self._heart is not None and self._heart.is_ours:
            return
        if native.is_eventlet():
            raise SettingsError(EVENTLET)
        self._pipe = native.Pipe()
        heart = Heart(self)
        heart.start()
        self._heart = heart

    def update_rings(self) -> None:
        """Hear the rings of the queues that are consumed now."""
        if self._heart is None:
            return
        names = self._consumed_queues()
        rings = [ring(name) for name in names for ring in (ring_of_queue, ring_of_return)]
        self._heart.wanted = frozenset([*rings, *self.broadcasts.rings(names)])
        self._step, self._poll_at = 0, 0.0
        self.broadcasts.start(names)
        self.wake()

    def check_fetched(self, fetched: messages.Fetched) -> None:
        """Raise if a fetch found this consumer declared dead; note when the next message is due."""
        if not fetched.is_alive:
            raise psycopg.OperationalError("this consumer was declared dead, and others have its messages")
        self._due_at = inf if fetched.due_in_s is None else monotonic() + fetched.due_in_s

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

    # -- what the heart asks ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a poll soon."""
        if self._pipe is not None:
            self._pipe.write()

    def end_late_soon(self) -> None:
        """Have the heart see to ends of messages if the loop is busy, or was left for a warm stop."""
        if self._heart is not None:
            self._heart.wake()

    def end_late(self, run: Run) -> bool:
        """Carry out ends of messages that were reported a while ago, in the heart's thread; tell whether to go on."""
        channels = list(self.channels)
        for channel in channels:
            channel.end_late(LATE_S, run)
        return any(channel.is_busy for channel in channels)

    def listens_to(self) -> tuple[int, Sequence[str]]:
        """Return the exchanges whose events are delivered, and the id up to which that is done."""
        return self.broadcasts.of_events(self._consumed_queues())

    def expiring_queues(self) -> Sequence[str]:
        """Return the consumed queues that would expire, and whose use was not noted lately.

        Nobody looks up a queue that only hears fanout exchanges: such a queue may expire.
        """
        names = [name for name in self._consumed_queues() if not self.broadcasts.hears_fanout_only(name)]
        return list(self.topology.expiring(names))

    def bound_dead_list(self, run: Run) -> None:
        """Drop what the dead list keeps no longer, in the heart's thread."""
        dead.bound(run, limit=self._options["dead_list_limit"], days=self._options["dead_list_days"])

    # -- polls ------------------------------------------------------------------------------------------------------

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have Celery's event loop run the polls."""
        self.start_heart()
        assert self._pipe is not None
        self.has_loop, self._loop = True, loop
        self.pulse.tick()
        loop.add_reader(self._pipe.fileno(), self._on_readable)
        loop.call_repeatedly(min(1.0, self.silence_s / BEATS), self._come_round)
        self.wake()

    def drain_events(self, connection: Any, timeout: float | None = None, **options: Any) -> None:
        """Deliver what there is, at least one message; TimeoutError if none comes in time."""
        deadline = inf if timeout is None else monotonic() + timeout
        while not self._poll():
            now = monotonic()
            if now >= deadline:
                raise TimeoutError("nothing came in time")
            files = [] if self._pipe is None else [self._pipe.fileno()]
            select.select(files, [], [], max(0.0, min(self._next_at(), deadline, now + LONGEST_WAIT_S) - now))

    def _on_readable(self) -> None:
        """Poll in the loop; then set the timer, which the loop minds before it waits again."""
        if self._poll():
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

    def _poll(self) -> bool:
        """Do all that is to be done now; tell whether anything was delivered."""
        if self._pipe is not None:
            self._pipe.drain()
        rings = self._take_rings()
        now = monotonic()
        hears = self._heart is None or self._heart.listens
        is_time = now >= self._poll_at
        if self._due_at <= now:
            self._promote()
        heard = () if self._heart is None else self._heart.take_heard()
        had_broadcasts = self.broadcasts.deliver_due(rings, self._consumed_queues(), heard, unrung=is_time, hears=hears)
        delivered = False
        for channel in list(self.channels):
            if is_time:
                channel.fetching.hungry = True
            self._pass_on(rings, channel)
            delivered |= channel.poll()
        is_news = delivered or any(not is_of_broadcast(ring) for ring in rings)
        if is_news:
            self._step = 0
        elif is_time:
            self._step = min(self._step + 1, len(BACK_OFF_S) - 1)
        if is_news or is_time:
            self._poll_at = monotonic() + (BACK_OFF_S[self._step] if hears else min(DEAF_S, BACK_OFF_S[self._step]))
        return had_broadcasts or delivered

    def _consumed_queues(self) -> list[str]:
        return [name for channel in list(self.channels) for name in list(channel._active_queues)]

    def _take_rings(self) -> set[str]:
        """Return what was rung; raise the error with which the heart has ended, as one of the connection."""
        if self._heart is None:
            return set()
        error = self._heart.error
        if error is not None:
            what = "was declared dead" if isinstance(error, DeclaredDead) else "has lost its connection"
            raise psycopg.OperationalError(f"this consumer {what}: {error}") from error
        return self._heart.take_rings()

    def _pass_on(self, rings: set[str], channel: Any) -> None:
        for queue in channel.fetched_queues:
            if ring_of_queue(queue) in rings:
                channel.fetching.hungry = True
            if DEATH in rings or ring_of_return(queue) in rings:
                channel.fetching.look_at_all()

    def _promote(self) -> None:
        """Make ready what is due."""
        self._due_at = inf
        due = self.link.run("promote", messages.promote)
        if len(due) == messages.PAGE:
            self._due_at = 0.0
        for queue in dict.fromkeys(due):
            self.link.ring_apart(ring_of_return(queue))
        for channel in self.channels:
            if not set(due).isdisjoint(channel.fetched_queues):
                channel.fetching.look_at_all()

    def _next_at(self) -> float:
        """Return when the next poll is due, if nothing wakes us before."""
        channels = (channel.next_at for channel in self.channels)
        at: float = min([self._poll_at, self._due_at, *channels])
        return at

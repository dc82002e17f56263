"""The worker's connection to the broker: the setup of a new connection, and the messages to give back at its end."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import bootsteps
from celery.concurrency.solo import TaskPool as Solo

from ...services.loop import Loop
from .. import events
from ..masking import masked
from ..patches import celery_consumer, draining
from ..patches.redis_client import keep_client
from ..worker import declined, delivered
from ..worker.appetite import Appetite
from ..worker.fetching import fetcher_of
from ..worker.outbox import WorkerOutbox

STOPS = {bootsteps.CLOSE, bootsteps.TERMINATE}


class DisconnectionStep(bootsteps.StartStopStep):
    """Part of Celery's consumer, which is stopped and started again with every connection."""

    # This runs after Celery has dropped its own things: it clears its queues before any step is stopped.
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, task_events: bool = True, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        events.remember(c, task_events)
        celery_consumer.survive_deleted_queues(c.blueprint)
        celery_consumer.note_lost_connections(c, delivered.note_lost_connection)
        declined.install(c)
        celery_consumer.give_up_malformed(c)
        self._looks: Loop | None = None
        self._appetite: Appetite | None = None
        if c.app.sidejob.settings.database_url is not None:
            self._appetite = Appetite(c)

    def start(self, c: Any) -> None:
        """Listen to the broker's messages about a new connection's consumers; on Redis one client hears all of them."""
        refers = c.app.sidejob.runtime.connections.is_broker
        if refers:
            c.connection.transport.outbox = WorkerOutbox(c.app)
        broker, is_green = c.connection.transport.driver_type, getattr(c.pool, "is_green", False)
        if broker == "amqp":
            draining.hear_cancellations(c.connection)
            draining.notice_breaks(c.connection)
            if is_green and c.event_dispatcher:
                draining.look_without_waiting(c.event_dispatcher.connection)
        if broker == "redis":
            celery_consumer.drop_unreadable(c.connection.transport.cycle)
        if broker == "redis" and is_green:
            tell = draining.fetch_when_there_is_room(c.connection, c.task_consumer.channel.qos)
            if self._appetite is not None:
                self._appetite.tell = tell
        # With solo an acknowledgement brings the next message, which could not be given back while a body runs. And if
        # a reference were gone before its row is locked, a kill in between would leave a message that no worker
        # fetches.
        delivered.Delivered.acks_at_end = refers or (broker == "amqp" and isinstance(c.pool, Solo))
        if self._appetite is not None:
            self._appetite.start(fetcher_of(c, self._appetite))
            if is_green:
                self._looks = Loop(self._appetite)  # a greenlet
                self._looks.start()
        keep_client(c.task_consumer.channel)

    def info(self, c: Any) -> dict[str, Any]:
        """Return the broker's part of `inspect stats`, instead of the result of Celery's own step."""
        broker = c.connection.info() if c.connection else {}
        broker.pop("password", None)
        return {"broker": masked(broker)} if broker else {}

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Let the event loop decide again and again how many messages are fetched."""
        if self._appetite is not None:
            self._appetite.register(hub)

    def stop(self, c: Any) -> None:
        """Give back messages that have not begun, if the worker stops; vouch for none, if the connection broke."""
        if self._looks is not None:
            self._looks.stop()
            self._looks = None
        if self._appetite is not None:
            self._appetite.holding.disconnected()
        # Celery before 5.7 does not close a broken connection.
        if self._appetite is not None and c.connection is not None and c.blueprint.state in STOPS:
            self._appetite.stop()
        for heartbeat in c.app.sidejob.heartbeats:  # none without a store
            begins = partial(delivered.begins_held, c.pool)
            heartbeat.jobs.disconnected(begins)
            heartbeat.tasks.disconnected(begins)

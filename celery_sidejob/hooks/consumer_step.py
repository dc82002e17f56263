"""The worker's connection to the broker: how it is spoken on, what is lost with it, and a deleted queue breaks it."""

from __future__ import annotations

from typing import Any

from celery import bootsteps

from . import rabbitmq
from .redis_client import keep_client


class DisconnectionStep(bootsteps.StartStopStep):
    """Part of Celery's consumer, which is stopped and started again with every connection."""

    # After what Celery itself drops then: it has cleared its queues before any step is stopped.
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        c.blueprint.start = rabbitmq.outliving_deleted_queues(c.blueprint.start)

    def start(self, c: Any) -> None:
        """Deliveries and acknowledgements use one client."""
        keep_client(c.task_consumer.channel)

    def stop(self, c: Any) -> None:
        """Vouch no longer for what was fetched over the connection that broke."""
        heartbeat = c.app.sidejob.heartbeat  # none without a store
        if heartbeat is not None:
            heartbeat.runs.disconnected()
            heartbeat.tasks.runs.disconnected()

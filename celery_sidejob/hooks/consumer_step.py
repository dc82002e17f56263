"""The worker's connection to the broker: when it breaks, what waits in the worker is no longer here."""

from __future__ import annotations

from typing import Any

from celery import bootsteps


class DisconnectionStep(bootsteps.StartStopStep):
    """Part of Celery's consumer, which is stopped and started again with every connection."""

    # After what Celery itself drops then: it has cleared its queues before any step is stopped.
    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        """Nothing is there yet."""

    def stop(self, c: Any) -> None:
        """Vouch no longer for what was fetched over the connection that broke."""
        heartbeat = c.app.sidejob.heartbeat  # none without a store
        if heartbeat is not None:
            heartbeat.runs.disconnected()

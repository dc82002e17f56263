"""A worker that RabbitMQ gives nothing, though messages wait: it consumes again.

When a quorum queue is deleted and declared again at once, RabbitMQ (3.10 and others) forgets its consumers and tells
them nothing: the worker stays connected, and is given nothing any more. Seen with a queue that was deleted under load.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from celery.worker import state

from ...model.logger import logger
from ...store import registry
from ...store.connection.connections import Connections
from .view import CeleryBroker

LOOK_S = 5.0


class RabbitMQWatchdog:
    """Looks whether an idle worker should have been given something; a queue is suspected at one look and left at two.

    Nobody can be asked whether RabbitMQ knows one consumer. So it is deaf if it has nothing to do while messages wait,
    and RabbitMQ counts fewer consumers of their queue than there are workers of ours: one that stands by for another
    (`x-single-active-consumer`) is counted. Several that are deaf leave one after the other, or together.
    """

    name = "rabbitmq-watchdog"

    def __init__(self, worker: Any, broker: CeleryBroker, connections: Connections) -> None:
        self._worker = worker
        self._broker = broker
        self._connections = connections
        self._taken = -1
        self._suspected: set[str] = set()

    def run_once(self) -> None:
        """Have the worker connect again if it is deaf."""
        taken, before = self._taken, self._suspected
        self._taken, self._suspected = state.all_total_count[0], set()
        consumer = getattr(self._worker.consumer, "task_consumer", None)
        if consumer is None or state.reserved_requests or self._taken != taken:
            return
        for queue in [queue.name for queue in list(consumer.queues)]:
            waiting, consumers = self._broker.waiting(queue)
            if not waiting:
                continue
            if queue in before and consumers < self._servers(queue):
                self._connect_again(queue)
                return
            self._suspected.add(queue)

    def wait_s(self) -> float:
        """Return how long to wait."""
        return LOOK_S

    def close(self) -> None:
        """Nothing is open."""

    def _servers(self, queue: str) -> int:
        return registry.workers_of_queues(self._connections, ()).get(queue, 0)

    def _connect_again(self, queue: str) -> None:
        logger.warning(
            "RabbitMQ does not know that this worker consumes from %r, as after its deletion: it connects again.", queue
        )
        with suppress(OSError, AttributeError):  # it is just connecting
            # The worker's own thread finds it closed, and does what it does whenever its broker hangs up.
            self._worker.consumer.connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)

"""What Celery's workers do by a transport's name, and have to do over this one too; read in Celery 5.7.0.

The transport imports nothing of Celery, and has no step of its own in a worker: it finds Celery's modules in
`sys.modules` when it connects, and a worker has imported them by then. If a later Celery has them elsewhere, workers do
not meet each other, `inspect scheduled` is empty, and `worker_disable_prefetch` is ignored.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from functools import wraps
from typing import Any

from ...store.broker import messages
from ..decoding import NotAMessageError

DRIVER = "postgres"
_ONCE = "__sidejobpg__"
"""Marks a function of Celery's that was replaced."""


def introduce() -> None:
    """Have Celery's worker, if this process is one, do all that it does over Redis."""
    for module, name in (("celery.worker.consumer.mingle", "Mingle"), ("celery.worker.consumer.gossip", "Gossip")):
        step = getattr(sys.modules.get(module), name, None)
        if step is not None:
            step.compatible_transports.add(DRIVER)
    control, tasks = sys.modules.get("celery.worker.control"), sys.modules.get("celery.worker.consumer.tasks")
    if control is not None:
        for command in ("scheduled", "dump_schedule"):
            _replace(control.Panel.data, command, _and_waiting)
    if tasks is not None and not hasattr(tasks.Tasks.start, _ONCE):
        tasks.Tasks.start = _marked(_limiting(tasks.Tasks.start))
        tasks.logger.addFilter(_is_no_false_warning)


def _replace(functions: dict[str, Any], name: str, make: Callable[[Any], Any]) -> None:
    if name in functions and not hasattr(functions[name], _ONCE):
        functions[name] = _marked(make(functions[name]))


def _marked(function: Any) -> Any:
    setattr(function, _ONCE, True)
    return function


# -- inspect scheduled -------------------------------------------------------------------------------------------------


def _and_waiting(scheduled: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Add to what waits in a worker's timer what waits in Postgres, in the queues that this worker consumes."""

    @wraps(scheduled)
    def answer(state: Any, **options: Any) -> list[Any]:
        found = scheduled(state, **options)
        transport = _ours(state.consumer)
        if transport is not None:
            consumer = state.consumer.task_consumer
            names = [queue.name for queue in consumer.queues]
            for row in transport.link.run("scheduled", lambda executor: messages.scheduled(executor, names)):
                is_readable = row.task_id is None or transport.outbox is not None
                with suppress(NotAMessageError):  # whoever fetches it gives it up
                    payload = consumer.channel.deliveries.payload_of(row) if is_readable else None
                    if payload is not None:
                        found.append(_shown(row, payload, consumer))
        return found

    return answer


def _shown(row: Any, payload: dict[str, Any], consumer: Any) -> dict[str, Any]:
    """Return a message as Celery's own answer has a request; of arguments that cannot be read what the sender shows."""
    message = consumer.channel.Message(payload, channel=consumer.channel, accept=consumer.accept)
    headers, sent = payload["headers"], payload["properties"].get("delivery_info") or {}
    args, kwargs = headers.get("argsrepr"), headers.get("kwargsrepr")
    try:
        args, kwargs, _ = message.payload
    except Exception:  # kombu's, and whatever a serializer raises
        args, kwargs = args or "", kwargs or ""
    return {
        "eta": row.due_at.astimezone(UTC).isoformat(),
        "priority": row.priority,
        "request": {
            "id": headers.get("id"),
            "name": headers.get("shadow") or headers.get("task"),
            "args": args,
            "kwargs": kwargs,
            "type": headers.get("task"),
            "hostname": None,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {
                "exchange": sent.get("exchange"),
                "routing_key": sent.get("routing_key"),
                "priority": row.priority,
                "redelivered": False,
            },
            "worker_pid": None,
        },
    }


# -- worker_disable_prefetch -------------------------------------------------------------------------------------------


def _limiting(start: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Have a worker with `worker_disable_prefetch` fetch only what its pool can begin, as Celery does on Redis."""

    @wraps(start)
    def started(step: Any, consumer: Any) -> None:
        start(step, consumer)
        if _ours(consumer) is not None and consumer.app.conf.get("worker_disable_prefetch"):
            reserved = sys.modules["celery.worker.state"].reserved_requests

            def spare() -> int:
                limit = getattr(consumer.controller, "max_concurrency", None) or consumer.pool.num_processes
                return int(limit) - len(reserved)

            consumer.task_consumer.channel.fetching.spare = spare

    return started


def _is_no_false_warning(record: logging.LogRecord) -> bool:
    """Tell whether a line of the log is true: Celery knows only that this is no Redis."""
    return not record.getMessage().startswith("worker_disable_prefetch is only") or DRIVER not in record.getMessage()


def _ours(consumer: Any) -> Any:
    """Return the transport of a worker's connection, if it is this one."""
    transport = getattr(consumer.connection, "transport", None)
    return transport if transport is not None and transport.driver_type == DRIVER else None

"""Runs a durable task from its row, without a broker, in the process of a test."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from celery import Celery, states
from celery.app.trace import trace_task
from kombu.compression import decompress
from kombu.serialization import loads, prepare_accept_content

from ...model.durable import DIGEST, WORKER, Digest, Message
from ...services.heartbeat.heartbeat import Heartbeat
from ..bodies import Outcome
from ..messages.kept_message import delivered
from .beginning import Copy


def run_kept(app: Celery, worker: Heartbeat, message: Message) -> Outcome | None:
    """Run a kept message like a pool's process, by Celery's own tracer; its end is written as usual.

    None if the gate of its queue was closed, or another run has it.
    """
    given = delivered(message)
    headers, properties = given["headers"], given["properties"]
    args, kwargs, embed = body_of(app, given)
    request: dict[str, Any] = {
        **headers,
        **embed,
        "args": args,
        "kwargs": kwargs,
        "is_eager": False,
        "called_directly": False,
        "delivery_info": properties["delivery_info"],
        "correlation_id": properties.get("correlation_id"),
        "reply_to": properties.get("reply_to"),
        "hostname": socket.gethostname(),
        WORKER: [(0, worker.worker_id)],
        DIGEST: Digest(message.content.digest),
    }
    key = (message.task_id, message.generation)
    delivery = worker.tasks.runs.received(key)  # otherwise the worker gives back a run longer than its lease
    try:
        traced = trace_task(app.tasks[message.task], message.task_id, args, kwargs, request, app=app)
    finally:
        worker.tasks.runs.over(delivery)
    if traced.info is None:
        return Outcome(traced.retval)
    error = traced.info.retval
    if isinstance(error, Copy):
        return None
    return Outcome(error=error) if traced.info.state == states.FAILURE else Outcome(rests=True)


def body_of(app: Celery, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return the arguments in a delivered message, and the rest of its body."""
    body = given["body"]
    if given["headers"].get("compression"):
        body = decompress(body, given["headers"]["compression"])
    accept = prepare_accept_content(app.conf.accept_content)
    args, kwargs, embed = loads(body, given["content-type"], given["content-encoding"], accept=accept)
    return args, kwargs, embed or {}

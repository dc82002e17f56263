"""The subscription to the result of a durable task, made once the message is kept; it may fail.

Celery subscribes before, and then a Redis that is away fails the call after twenty seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.backends.rpc import RPCBackend

from ..patches import result_backend
from .present_call import present_call

logger = logging.getLogger("celery_sidejob")


def install(backend: Any) -> None:
    """Put off what Celery asks of the backend for a call: `Call.subscriptions` collects it; twice does no harm."""
    result_backend.ask_by(backend, _on_task_call)


def subscribe_quietly(app: Celery, subscribe: Callable[[], Any]) -> None:
    """Ask the backend, where the broker does not seem to be away; whoever waits for the result asks again."""
    if not app.sidejob.runtime.broker.ready:
        return
    try:
        subscribe()
    except Exception as error:
        logger.warning("The result backend does not answer; the task is kept all the same: %s", error)


def _on_task_call(backend: Any, ask: Callable[..., Any], producer: Any, task_id: str) -> Any:
    subscriptions = present_call().subscriptions
    if subscriptions is None:
        return ask(producer, task_id)
    if isinstance(backend, RPCBackend):  # its queue must be there before the answer
        subscribe_quietly(backend.app, partial(ask, producer, task_id))
    else:
        subscriptions.append(partial(ask, producer, task_id))
    return {}

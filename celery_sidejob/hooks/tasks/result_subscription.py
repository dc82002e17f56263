"""What the result backend is to do for who calls a durable task: it is asked once the message is kept, and may fail.

Celery asks before, and then a Redis that is away fails the call after twenty seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery
from celery.backends.rpc import RPCBackend

from ..patches import task_call
from .present_call import present_call

logger = logging.getLogger("celery_sidejob")


def mind(backend: Any) -> None:
    """Have what the backend is asked for a call only added to what the call wants; twice does no harm."""
    task_call.install(backend, _on_task_call)


def ask_quietly(app: Celery, want: Callable[[], Any]) -> None:
    """Ask the backend, where the broker does not seem to be away; whoever waits for the result asks again."""
    if not app.sidejob.runtime.broker.ready:
        return
    try:
        want()
    except Exception as error:
        logger.warning("The result backend does not answer; the task is kept all the same: %s", error)


def _on_task_call(backend: Any, ask: Callable[..., Any], producer: Any, task_id: str) -> Any:
    wanted = present_call().wanted
    if wanted is None:
        return ask(producer, task_id)
    if isinstance(backend, RPCBackend):  # its queue must be there before the answer
        ask_quietly(backend.app, partial(ask, producer, task_id))
    else:
        wanted.append(partial(ask, producer, task_id))
    return {}

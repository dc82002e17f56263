"""Replaces `Celery.send_task` of one app; read in Celery 5.5.0 and 5.7.0.

`delay`, `apply_async`, canvas, retries and beat end in it. It asks the result backend before it sends, and takes a
producer from the app's pool for each message; the message itself is kept further down (`task_sender.py`). Ours checks
the call of a durable task, asks the backend afterwards, and gives it a producer that is taken when it is used: the
sixth of its arguments after the name. If a later Celery calls tasks in another way, durable ones are still kept; but
their options are not checked, and a call waits for a backend that is away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery

from .wrapping import wrap


def install(app: Celery, send: Callable[..., Any]) -> None:
    """Have tasks sent by ``send(app, Celery's own, name, ...)``; reads no configuration."""
    wrap(app, "send_task", partial(send, app))

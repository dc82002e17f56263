"""Replaces `MultiChannelPoller.on_readable` of one worker's connection to Redis; read in kombu 5.5.2 and 5.7.0.

It reads an answer of Redis, and delivers the message in it. A text that is no message of kombu's raises an error there,
before Celery sees it, and ends the worker. Ours logs the error. If a later kombu reads elsewhere, one such text in a
queue ends a worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty
from typing import Any

from .task_handler import OF_MESSAGES
from .wrapping import wrap

logger = logging.getLogger("celery_sidejob")


def install(poller: Any) -> None:
    """Have what cannot be read dropped, and the worker go on with the next."""
    wrap(poller, "on_readable", _read_or_drop)


def _read_or_drop(before: Callable[[int], Any], fileno: int) -> Any:
    try:
        return before(fileno)
    except OF_MESSAGES:
        logger.exception("What Redis sent is no message, and was dropped")
        raise Empty from None

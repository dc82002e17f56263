"""Replaces `kombu.utils.functional.sleep`, in a worker with gevent; read in kombu 5.5.2 and 5.7.0.

`retry_over_time` calls this name of its module between two tries to connect: up to half a minute, on a broker that is
down. gevent looks at all objects there are when it replaces Python's locks, Celery's lazy names among them, which
import kombu; and it replaces `time.sleep` only after that. If a later kombu pauses by another name, all greenlets stand
still while it connects.
"""

from __future__ import annotations

import time

from kombu.utils import functional


def install() -> None:
    """Let bodies go on while kombu pauses."""
    functional.sleep = time.sleep

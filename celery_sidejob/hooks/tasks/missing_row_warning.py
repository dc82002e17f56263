"""Tells of messages that say they have a row, and have none in this worker's store.

Most are copies of what has ended, and nothing to be told of. But if a client keeps its rows in another schema or
database than the workers look into, each of its messages is one: its tasks never run, and nobody would be told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from celery.app.task import Context

from ...model.durable import is_first
from ...model.errors import StoreUnavailableError
from ...operations.runtime import Runtime
from ...store.outbox import tasks

logger = logging.getLogger("celery_sidejob")

PAUSE_S = 60.0
"""How long this process says nothing more after a warning, of whichever task."""

_told: set[str] = set()
"""Tasks of which it was told."""
_told_at = -PAUSE_S


def warn(task: str, request: Context, places: Sequence[Runtime]) -> None:
    """Warn, once for each task, if what looks like the first delivery of its message has no row in these stores."""
    global _told_at
    if task in _told or time.monotonic() < _told_at + PAUSE_S or not is_first(request.__dict__):
        return
    try:
        for there in places:
            wait_s = there.stores.wait_s
            row = there.connections.read(lambda executor: tasks.read(executor, request.id), within_s=wait_s)
            if row is not None:
                return  # it runs, or waits as a retry
    except StoreUnavailableError:
        return
    _told.add(task)
    _told_at = time.monotonic()
    logger.warning(
        "%s[%s] has no row in schema %r, so it is not run: a copy of one that has ended, or its client has another "
        "sidejob_schema or sidejob_database_url. Of this task it is not told again.",
        task, request.id, places[0].settings.schema,
    )  # fmt: skip

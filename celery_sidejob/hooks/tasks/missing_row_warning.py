"""Warns of messages whose row is in no store of this worker.

Most are copies of tasks that have ended, and harmless. But if a client keeps its rows in another schema or database
than its workers, its tasks never run, and that would go unnoticed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery.app.task import Context

from ...model.durable import HEADER, REPUBLISHED
from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...operations.runtime import Runtime
from ...store.outbox import tasks

PAUSE_S = 60.0
"""Seconds for which this process logs no further warning, for any task."""

_KEYS_OF_A_FIRST = {"v", "n", "s"}

_told: set[str] = set()
"""The names of the tasks that were warned about."""
_told_at = -PAUSE_S


def warn(task: str, request: Context, stores: Sequence[Runtime]) -> None:
    """Warn, once for each task, if a delivery that looks like the first of its message has no row in these stores."""
    global _told_at
    if task in _told or time.monotonic() < _told_at + PAUSE_S or not is_first(request.__dict__):
        return
    try:
        for there in stores:
            row = there.connections.read(lambda executor: tasks.read(executor, request.id), within_s=there.wait_s)
            if row is not None:
                return  # it runs, or waits as a retry
    except StoreUnavailableError:
        return
    _told.add(task)
    _told_at = time.monotonic()
    logger.warning(
        "%s[%s] has no row in schema %r, so it is not run: a copy of one that has ended, or its client has another "
        "sidejob_schema or sidejob_database_url. This is logged once for each task.",
        task,
        request.id,
        stores[0].settings.schema,
    )


def is_first(request: Mapping[str, Any]) -> bool:
    """Tell whether a delivery is plainly the first of its message, and its row unchanged since it was kept.

    It is not a retry or a message that has waited for an eta, was published or delivered again, or may have a copy in
    another store. For a copy that only looks like the first, as from a restored broker, the warning is needless.
    """
    header = request.get(HEADER)
    if not isinstance(header, Mapping) or header.get("n") != 1 or not header.keys() <= _KEYS_OF_A_FIRST:
        return False
    if request.get("retries") or request.get("eta") or request.get(REPUBLISHED) or request.get("redelivered"):
        return False
    properties = request.get("properties") or {}
    if request.get("x-delivery-count") or properties.get("delivery_count"):
        return False
    return not (request.get("delivery_info") or {}).get("redelivered")

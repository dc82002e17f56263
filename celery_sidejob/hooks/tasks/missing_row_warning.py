"""Warns of messages whose row is in no store of this worker.

Most are copies of tasks that have ended, and harmless. But if a client keeps its rows in another schema or database
than the workers read, its tasks never run, and nobody would notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from celery.app.task import Context

from ...model.durable import HEADER, REPUBLISHED
from ...model.errors import StoreUnavailableError
from ...operations.runtime import Runtime
from ...store.outbox import tasks

logger = logging.getLogger("celery_sidejob")

PAUSE_S = 60.0
"""How long this process logs no further warning, of whichever task."""

_KEYS_OF_A_FIRST = {"v", "n", "s"}

_told: set[str] = set()
"""Tasks already warned about."""
_told_at = -PAUSE_S


def warn(task: str, request: Context, stores: Sequence[Runtime]) -> None:
    """Warn, once for each task, if what looks like the first delivery of its message has no row in these stores."""
    global _told_at
    if task in _told or time.monotonic() < _told_at + PAUSE_S or not is_first(request.__dict__):
        return
    try:
        for there in stores:
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
        "sidejob_schema or sidejob_database_url. This is logged once for each task.",
        task, request.id, stores[0].settings.schema,
    )  # fmt: skip


def is_first(request: Mapping[str, Any]) -> bool:
    """Tell whether a delivery is plainly the first of its message, and its row unchanged since it was kept.

    Not a retry, not a message that has waited for an eta, was published or delivered again, or may have a copy in
    another store. A copy that only looks like the first, as from a restored broker, is warned of in vain.
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

"""A job's message in a worker that does not know its task."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ...model.messages import is_readable, why_no_doorbell
from ...operations import parking
from ..messages.doorbell import HEADER
from ..patches import unknown_task
from ..worker.holders import holders

logger = logging.getLogger("celery_sidejob")


def install(consumer: Any) -> None:
    """Have a consumer's worker park such jobs."""
    unknown_task.replace(consumer, partial(_park, consumer))


def _park(consumer: Any, message: Any) -> bool:
    """Have the job parked as soon as that can be done; False if this is no message of a job in a store of this worker.

    The message is acknowledged: nobody else needs it. If the worker dies before the job is parked, the message counts
    as missing, and is sent again.
    """
    header = message.headers.get(HEADER)
    if header is None or why_no_doorbell(header) is not None or not is_readable(header):
        return False
    task = message.headers["task"]
    for heartbeat in holders(consumer.app, None):
        message.ack_log_error(logger, consumer.connection_errors)
        heartbeat.errands.soon(
            partial(parking.park, heartbeat.runtime, header["job"], for_run=header["for_run"], task=task)
        )
        return True
    return False

"""The message that a worker gets for a reference to a row, if the store is the broker: the row's message."""

from __future__ import annotations

import json
from typing import Any

from celery import Celery

from ...model.durable import Message
from ...model.errors import InvalidValueError
from ...model.logger import logger
from ...model.messages import Doorbell
from ...transport.decoding import Payload
from . import doorbell, kept_message
from .carried import NewerFormatError


def delivered(app: Celery, row: Any) -> Payload | None:
    """Return kombu's message for a fetched reference and its row; None if no run is owed any more.

    Also None for a row that is unreadable here: it is sent again when it has been silent for a while, perhaps to a
    newer worker, and the sweeper buries rows that are unreadable for all.
    """
    try:
        found = _delivered(app, row)
    except (InvalidValueError, NewerFormatError) as error:
        logger.warning("A message in queue %s is left: %s", row.queue, error)
        return None
    if found is None:
        return None
    properties = found["properties"]  # kombu's transports have the priority in both places; Celery reads this one
    properties["priority"] = properties["delivery_info"]["priority"]
    return Payload(found)


def _delivered(app: Celery, row: Any) -> dict[str, Any] | None:
    if row.job_id is not None:
        options = json.loads(row.options) if row.options else None
        bell = Doorbell(row.job_id, row.generation, row.task_id, row.task, row.queue, row.priority, options)
        return doorbell.delivered(app, bell)
    if row.kept is None:
        return None
    message = Message(
        row.task_id,
        row.task,
        row.queue,
        row.publication,
        bytes(row.kept),
        row.generation,
        expires_at=row.expires_at,
        again=row.again or row.returns > 0,
    )
    return kept_message.delivered(message)

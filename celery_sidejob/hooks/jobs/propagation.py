"""Headers that libraries add to a message when it is published, kept with the asking: so traces continue through jobs.

OpenTelemetry and others listen to Celery's `before_task_publish` and add a header or two. A job's message is published
later, perhaps by another process, and perhaps again. So the signal is sent when the job is made, and the added headers
are kept with the asking's options, for every publication.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from celery import signals
from kombu.utils.json import dumps as kombu_dumps

logger = logging.getLogger("celery_sidejob")


def propagated(
    task: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, queue: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the headers of an asking: the given headers, and those that receivers add."""
    given = dict(options.get("headers") or {})
    if not signals.before_task_publish.receivers:
        return given
    message = {
        "lang": "py",
        "task": task,
        "id": task_id,
        "retries": 0,
        "root_id": options.get("root_id") or task_id,
        "parent_id": options.get("parent_id"),
        "group": options.get("group_id"),
        **given,
    }
    headers = dict(message)
    body: tuple[Any, ...] = (tuple(args), dict(kwargs), {})
    about = {"body": body, "exchange": "", "routing_key": queue, "headers": headers}
    signals.before_task_publish.send(
        sender=task, declare=[], retry_policy=None, properties={"correlation_id": task_id}, **about
    )
    signals.after_task_publish.send(sender=task, **about)
    added = {key: value for key, value in headers.items() if key not in message or message[key] != value}
    return {**given, **{key: value for key, value in added.items() if _can_be_kept(key, value)}}


def _can_be_kept(key: Any, value: Any) -> bool:
    """Tell whether a header survives in a row; a fault of another library must not prevent a job."""
    try:
        json.loads(kombu_dumps({key: value}))
    except (TypeError, ValueError) as error:
        logger.warning("A receiver of before_task_publish added a header that cannot be kept, %r: %s", key, error)
        return False
    return True

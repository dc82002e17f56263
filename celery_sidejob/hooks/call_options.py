"""The options of a durable task's call, looked at before anything is kept.

Celery puts what it does not know into the message's properties, so that a `countdwn` is nobody's, and the task runs at
once; what is no time ends in whatever error is raised by who meets it first.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery import Celery
from celery.app.task import Task
from kombu import Producer

from ..model.errors import InvalidValueError
from ..model.given import LONGEST_S, is_seconds
from .given_options import check_options
from .kept_message import PROPERTIES, time_of
from .task_options import CLOSE

KNOWN = PROPERTIES.union(
    *(inspect.signature(taking).parameters for taking in (Celery.send_task, Task.apply_async, Producer.publish)),
    {"queue", "exchange_type", "ignore_result", "stamped_headers", "transaction", "event_dispatcher"},
    {"user_id", "cluster_id", "timestamp"},
)
"""What a call may be given, as far as it has a meaning to Celery, to kombu or to us."""


HIGHEST = 255
"""The largest priority for which a message has room."""


def check_call(task: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidValueError for an option with a slip in its name, and for what is no time or no priority.

    Names that are like none of these are left alone: the project's own stamps, say, and what its broker understands.
    """
    unknown = options.keys() - KNOWN
    if unknown:
        for name in sorted(unknown.difference(options.get("stamped_headers") or ())):
            near = difflib.get_close_matches(name.lower(), KNOWN, 1, CLOSE)
            if near:
                raise InvalidValueError(f"{name!r} is no option of a call of {task}. Did you mean {near[0]!r}?")
    countdown, priority = options.get("countdown"), options.get("priority")
    if countdown is not None and not is_seconds(countdown, least=-LONGEST_S):
        raise InvalidValueError(f"countdown is a number of seconds, not {countdown!r} (a call of {task}).")
    if priority is not None and (not isinstance(priority, int) or not 0 <= priority <= HIGHEST):
        raise InvalidValueError(f"priority is a whole number from 0 to {HIGHEST}, not {priority!r} (a call of {task}).")
    check_options(task, options)
    headers = options.get("headers") or {}
    if not isinstance(headers, Mapping):
        raise InvalidValueError(f"headers is a mapping, not {headers!r} (a call of {task}).")
    for name, own in (("task", task), ("id", options.get("task_id"))):
        if headers.get(name, own) != own:  # a retry brings along those of its message
            raise InvalidValueError(f"headers hold {name!r}, which is Celery's own: give it another name ({task}).")
    for name in ("eta", "expires"):
        given = options.get(name)
        if given is not None and not _is_time(given, or_seconds=name == "expires"):
            form = "a datetime, or a text in ISO 8601" + (", or a number of seconds" if name == "expires" else "")
            raise InvalidValueError(f"{name} is {form}, not {given!r} (a call of {task}).")


def _is_time(given: Any, *, or_seconds: bool) -> bool:
    if isinstance(given, str):  # as a retry has it
        try:
            return time_of(given) is not None
        except ValueError:
            return False
    return isinstance(given, datetime) or (or_seconds and is_seconds(given, least=-LONGEST_S))

"""Checks the options of a call of a sidejob task or a durable task, before anything is kept.

Celery puts unknown options into the message's properties: with a `countdwn` the task runs at once. A value that is no
time would raise an error that does not name the option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from celery import Celery
from celery.app.task import Task
from kombu import Producer

from ..model.checks import MOST_S, SLIP, Form, is_in_calendar, is_near, is_number, is_seconds, is_text, misfit, nearest
from ..model.errors import InvalidValueError
from .messages.kept_message import PROPERTIES, time_of

KNOWN = PROPERTIES.union(
    *(inspect.signature(taking).parameters for taking in (Celery.send_task, Task.apply_async, Producer.publish)),
    {"queue", "exchange_type", "ignore_result", "stamped_headers", "transaction", "event_dispatcher"},
    {"unique", "on_duplicate", "depends_on", "on_failure"},
    {"user_id", "cluster_id", "timestamp"},
)
"""Options of a call that have a meaning for Celery, kombu or this package."""

HIGHEST = 255
"""The largest priority that fits into a message."""


def _is_signature(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("task"), str)


def _several(fits: Callable[[Any], bool], *kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and all(fits(each) for each in value)


def _is_time(value: Any) -> bool:
    if isinstance(value, str):  # as in a retry
        try:
            value = time_of(value)
        except ValueError:
            return False
    return isinstance(value, datetime) and is_in_calendar(value)


_SIGNATURES = (
    "a signature, as task.s(...), or a list of them",
    lambda value: _is_signature(value) or _several(_is_signature, list, tuple)(value),
)
_TEXT = ("a text", is_text)
_SECONDS = (f"a number of seconds, not negative, {MOST_S}", is_seconds)
_NEAR = f"a number of seconds, {MOST_S}"
_NUMBER = ("a whole number", is_number)
FORMS: Mapping[str, Form] = {
    "link": _SIGNATURES,
    "link_error": _SIGNATURES,
    "chain": _SIGNATURES,
    "chord": ("a signature, as task.s(...)", _is_signature),
    "group_id": _TEXT,
    "root_id": _TEXT,
    "parent_id": _TEXT,
    "shadow": _TEXT,
    "reply_to": _TEXT,
    "group_index": _NUMBER,
    "replaced_task_nesting": _NUMBER,
    "time_limit": _SECONDS,
    "soft_time_limit": _SECONDS,
    "ignore_result": ("True or False", lambda value: isinstance(value, bool)),
    "stamped_headers": ("a list of texts", _several(is_text, list, tuple, set, frozenset)),
}
"""Options of Celery that calls of jobs and of durable tasks have in common; each may also be None."""

OF_DURABLE_TASKS: Mapping[str, Form] = {
    "countdown": (_NEAR, is_near),
    "priority": (f"a whole number from 0 to {HIGHEST}", lambda value: is_number(value, most=HIGHEST)),
    **FORMS,
    "headers": ("a mapping", lambda value: not value or isinstance(value, Mapping)),
    "eta": ("a datetime, or a text in ISO 8601", _is_time),
    "expires": (f"a datetime, or a text in ISO 8601, or {_NEAR}", lambda v: _is_time(v) or is_near(v)),
}


def check_options(task: str, options: Mapping[str, Any], forms: Mapping[str, Form] = FORMS) -> None:
    """Raise InvalidValueError for an option of a call with an invalid value."""
    wrong = misfit(options, forms)
    if wrong is not None:
        raise InvalidValueError(f"{wrong} (a call of {task}).")


def check_call(task: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidValueError for an option of a durable task's call that is misspelt or has an invalid value.

    Other unknown names are accepted, such as the project's own stamps, and options that its broker understands.
    """
    check_options(task, options, OF_DURABLE_TASKS)
    _check_spelling(task, options)
    headers = options.get("headers") or {}
    for name, own in (("task", task), ("id", options.get("task_id"))):
        if headers.get(name, own) != own:  # a retry brings its message's own
            raise InvalidValueError(f"headers hold {name!r}, which is Celery's own: give it another name ({task}).")


def _check_spelling(task: str, options: Mapping[str, Any]) -> None:
    unknown = options.keys() - KNOWN
    for name in sorted(unknown.difference(options.get("stamped_headers") or ())):
        near = nearest(name.lower(), KNOWN, like=SLIP)
        if near is not None:
            raise InvalidValueError(f"{name!r} is no option of a call of {task}. Did you mean {near!r}?")

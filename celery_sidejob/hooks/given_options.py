"""What a call of Celery's is given beside its arguments, looked at by what it means: of jobs and of durable tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from ..model.errors import InvalidValueError
from ..model.given import is_keepable, is_seconds, shown
from ..model.messages import is_number


def _is_signature(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("task"), str)


def _are_signatures(value: Any) -> bool:
    return all(map(_is_signature, value)) if isinstance(value, list | tuple) else _is_signature(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_keepable(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(map(_is_text, value))


_SIGNATURES = ("a signature, as task.s(...), or a list of them", _are_signatures)
_TEXT = ("a text", _is_text)
_SECONDS = ("a number of seconds", is_seconds)
_NUMBER = ("a whole number", is_number)
OPTIONS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
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
    "stamped_headers": ("a list of texts", _are_texts),
}
"""What each may be, beside None."""


def check_options(what: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidValueError for the first option that is not what it may be."""
    for name in OPTIONS.keys() & options.keys():
        form, fits = OPTIONS[name]
        if options[name] is not None and not fits(options[name]):
            raise InvalidValueError(f"{name} is {form}, not {shown(options[name])} (a call of {what}).")


def is_expiry(value: Any) -> bool:
    """Tell whether it is a datetime, or a number of seconds."""
    return isinstance(value, datetime) or is_seconds(value)

"""The arguments and the options of an asking: which a call may have, which are kept, and headers that libraries add."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from celery import signals
from kombu.exceptions import EncodeError
from kombu.utils.json import dumps as kombu_dumps

from ...model.checks import SECONDS, did_you_mean, is_seconds, shown
from ...model.columns import OPTIONS
from ...model.errors import InvalidValueError
from ...model.logger import logger
from ..call_options import check_options

KEPT = frozenset(
    {
        "link", "link_error", "chain", "chord", "group_id", "group_index", "root_id", "parent_id", "headers",
        "time_limit", "soft_time_limit", "expires", "shadow", "ignore_result", "reply_to", "stamped_headers",
        "replaced_task_nesting",
    }
)  # fmt: skip
"""Options that belong to an asking and are kept with it."""

IN_HEADERS = ("shadow", "root_id", "parent_id", "time_limit", "soft_time_limit")
"""Options that a job's message carries in its headers."""

PASSED_OVER = frozenset(
    {
        "producer", "publisher", "connection", "router", "add_to_parent", "serializer", "compression", "retry",
        "retry_policy", "exchange_type", "delivery_mode", "timeout", "confirm_timeout",
        "task_type", "result_cls", "retries", "origin", "argsrepr", "kwargsrepr", "immutable", "mandatory", "immediate",
    }
)  # fmt: skip
"""Options for how Celery sends a message. They are ignored: a job's message is ours, and is sent until the broker has
it."""

ADDRESS = frozenset({"exchange", "routing_key"})
"""Options that replace `queue`; one of the app's queues must be bound in this way."""

_ALL_OPTIONS = sorted(
    KEPT
    | ADDRESS
    | OPTIONS.keys()
    | {"queue", "parent", "child_name", "eta", "countdown", "inports", "outports", "aliases", "state"}
    | {"priority", "transaction", "task_id", "unique", "on_duplicate"}
)


def kept_of(task: Any, options: Mapping[str, Any], *, localize: Callable[[datetime], datetime]) -> dict[str, Any]:
    """Separate the options that are kept with an asking from its task id and its time."""
    given = dict(options)
    found = {name: given.pop(name, None) for name in ("task_id", "eta", "countdown")}
    check_options(getattr(task, "name", "a job"), given)
    _check_spelling(task, given)
    kept = {key: value for key, value in given.items() if key in KEPT and value is not None}
    for key in ("link", "link_error"):
        if key in kept and not isinstance(kept[key], list | tuple):
            kept[key] = [kept[key]]
    expires = kept.get("expires", getattr(task, "expires", None))
    if expires is not None:
        kept["expires"] = _expiry(expires, localize)
    try:
        found["options"] = json.loads(kombu_dumps(kept))
        json.dumps(found["options"], allow_nan=False)
    except (TypeError, ValueError, RecursionError, EncodeError) as error:
        raise InvalidValueError(f"The options of an asking must be JSON values: {error}") from error
    return found


def _expiry(expires: Any, localize: Callable[[datetime], datetime]) -> dict[str, Any]:
    """Return `expires=` in the form of an asking: seconds from the asking, or a time."""
    if not isinstance(expires, datetime) and not is_seconds(expires):
        raise InvalidValueError(f"expires is a datetime or {SECONDS}, not {shown(expires)}.")
    if isinstance(expires, int | float):
        return {"after_s": expires}
    return {"at": localize(expires).isoformat()}


def propagated(
    task: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, queue: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the headers of an asking: the given headers, and those that receivers add.

    OpenTelemetry and others listen to Celery's `before_task_publish` and add a header or two. A job's message is
    published later, perhaps by another process, and perhaps again. So the signal is sent when the job is made, and the
    added headers are kept with the asking's options, for every publication.
    """
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


def check_arguments(run: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if a task's body, given a running job first, does not take these arguments."""
    signature = _signature(run)
    if not signature.parameters:
        raise TypeError(
            f"{name}: its body takes no argument, but is given the running job: begin its parameters with `job`."
        )
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error} (the running job is given by the worker)") from None


def _check_spelling(task: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown option, with a suggestion; `task` is None for a task that is not known here."""
    unknown = options.keys() - KEPT - ADDRESS - PASSED_OVER - set(options.get("stamped_headers") or ())
    if not unknown:
        return
    meant = [name for name in _parameters(task) if name in unknown]
    if meant:
        pairs = ", ".join(f"{name!r}: ..." for name in meant)
        raise TypeError(
            f"{', '.join(map(repr, meant))}: no option of enqueue() or apply_async(), but an argument of "
            f"{task.name}. Give it as kwargs={{{pairs}}}."
        )
    name = sorted(unknown)[0]
    raise TypeError(f"{name!r} is no option of enqueue() or apply_async().{did_you_mean(name, _ALL_OPTIONS)}")


def _parameters(task: Any) -> list[str]:
    """Return the names of a body's arguments beside the running job; none for a task that is not known here."""
    return [] if task is None else list(_signature(task.run).parameters)[1:]


# Finding this out takes a tenth of the time in which a thousand jobs are made.
_signature = lru_cache(maxsize=1024)(inspect.signature)

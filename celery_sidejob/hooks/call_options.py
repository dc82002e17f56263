"""The options of a call of a sidejob task or a durable task: their checks, and which are kept with a job's asking.

They are checked before anything is kept. Celery puts unknown options into the message's properties: with a `countdwn`
the task runs at once. A value that is no time would raise an error that does not name the option.

An option `capacity`, of `CapacityPool.apply_async` or of the task, says how the call gets slots of a capacity pool.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from celery import Celery, signals
from celery.app.task import Task
from kombu import Producer
from kombu.exceptions import EncodeError
from kombu.utils.json import dumps as kombu_dumps

from ..jobs.capacity import CapacityPool
from ..model import checks
from ..model.capacity import Admission
from ..model.checks import MOST_S, SECONDS, SLIP, Form, did_you_mean, misfit, nearest, shown
from ..model.columns import OPTIONS
from ..model.errors import InvalidValueError
from ..model.logger import logger
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
    return isinstance(value, datetime) and checks.is_in_calendar(value)


_SIGNATURES = (
    "a signature, as task.s(...), or a list of them",
    lambda value: _is_signature(value) or _several(_is_signature, list, tuple)(value),
)
_TEXT = ("a text", checks.is_text)
_SECONDS = (f"a number of seconds, not negative, {MOST_S}", checks.is_seconds)
_NEAR = f"a number of seconds, {MOST_S}"
_NUMBER = ("a whole number", checks.is_number)
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
    "stamped_headers": ("a list of texts", _several(checks.is_text, list, tuple, set, frozenset)),
}
"""Options of Celery that calls of jobs and of durable tasks have in common; each may also be None."""

OF_DURABLE_TASKS: Mapping[str, Form] = {
    "countdown": (_NEAR, checks.is_near),
    "priority": (f"a whole number from 0 to {HIGHEST}", lambda value: checks.is_number(value, most=HIGHEST)),
    **FORMS,
    "headers": ("a mapping", lambda value: not value or isinstance(value, Mapping)),
    "eta": ("a datetime, or a text in ISO 8601", _is_time),
    "expires": (f"a datetime, or a text in ISO 8601, or {_NEAR}", lambda v: _is_time(v) or checks.is_near(v)),
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


OF_FOLLOWERS = ("root_id", "parent_id", "chord", "group_id")
"""Options of calls by Celery itself: links, errbacks, the rest of a chain, parts and bodies of chords and groups."""


def pools_of(app: Celery) -> list[CapacityPool]:
    """Return the capacity pools of an app's tasks and queues."""
    pools = [getattr(task, "capacity", None) for task in app.tasks.values()]
    pools += [settings.get("pool") for settings in (app.sidejob.settings.queues or {}).values()]
    return list({pool.spec: pool for pool in pools if isinstance(pool, CapacityPool)}.values())


def admission_to(app: Celery, queue: str, *, follows: bool) -> Admission | None:
    """Return how a work gets slots of the pool that `sidejob_queues` gives to its queue; None without a pool."""
    pool = (app.sidejob.settings.queues or {}).get(queue, {}).get("pool")
    if pool is None:
        return None
    admission = Admission.of(pool.spec)
    return replace(admission, mode="wait") if follows else admission


def waiting_in(app: Celery, task: str, queue: str) -> Admission | None:
    """Return how a work without a caller waits for slots in a queue; None without a pool."""
    own = admission_of(app.tasks.get(task), {})
    return admission_to(app, queue, follows=True) if own is None else replace(own, mode="wait")


def is_follower(options: Mapping[str, Any]) -> bool:
    """Tell by its options whether a call follows another call, made by Celery: such a call is never refused."""
    return any(options.get(name) for name in OF_FOLLOWERS)


def admission_of(task: Any, options: dict[str, Any]) -> Admission | None:
    """Take `capacity` out of the options of a call, and return how its work gets slots; None without a pool.

    A call that follows another call is never refused: its own follow-ups would be lost.
    """
    given = options.pop("capacity", None)
    if given is not None:
        if not isinstance(given, Admission):
            raise InvalidValueError(
                f"capacity= is an option of tasks, and no option of a call: call CapacityPool.apply_async(task, ...); "
                f"got {shown(given)}."
            )
        return given
    pool = getattr(task, "capacity", None)
    return following(Admission.of(pool.spec), options) if isinstance(pool, CapacityPool) else None


def following(admission: Admission, options: Mapping[str, Any]) -> Admission:
    """Return the admission of a call with these options: if the call follows another call, that of a follower."""
    return replace(admission, mode="wait") if is_follower(options) else admission


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
    _check_option_names(task, given)
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
    if not isinstance(expires, datetime) and not checks.is_seconds(expires):
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


def _check_option_names(task: Any, options: Mapping[str, Any]) -> None:
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

"""Checks a message that a worker has received; one that cannot be run raises Celery's InvalidTaskError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery.exceptions import InvalidTaskError

from ...model.checks import is_number
from ...model.durable import ADOPTED, CALL, DIGEST, HELD, WORKER
from ...model.names import why_not_name, why_not_storable
from ..messages.carried import CELERYS

OF_THE_PARENT = (WORKER, ADOPTED, HELD, DIGEST)
"""Keys by which the worker's parent process tells the pool's something; headers of a message may have such names."""
TEXTS = (
    "shadow",
    "root_id",
    "parent_id",
    "group",
    "argsrepr",
    "kwargsrepr",
    "lang",
    "origin",
    "reply_to",
    "compression",
)
LISTS = ("callbacks", "errbacks", "chain")
"""Options that list calls. Celery would take each letter of a text for one, and send as many messages."""
OURS = "sidejob"
"""How names of ours begin."""
NO_OPTIONS = CELERYS | {
    "args",
    "kwargs",
    "hostname",
    "is_eager",
    "called_directly",
    "headers",
    "properties",
    "delivery_info",
    "reply_to",
    "correlation_id",
}
"""Names that a body's options may not have: in a pool's process they replace headers, and what the parent says."""
MOST_OF_ID = 2000
"""Characters of a task id that the store can index; calls of ours are held to fewer."""
MOST_RETRIES = 2**31 - 1


def check_request(
    request: Mapping[str, Any], payload: Any, header: str, why_not: Callable[[object], str | None]
) -> None:
    """Raise InvalidTaskError for a request that cannot be run; `header` is what our publishers say in it."""
    _check(_why_no_id(request.get("id")), "id")
    if request.get(header) is not None:
        _check(why_not(request[header]), header)
    retries = request.get("retries")
    _check(None if retries is None or is_number(retries, most=MOST_RETRIES) else "it is no number", "retries")
    _check(None if request.get(CALL) is None else why_not_name(request[CALL]), CALL)
    for name in TEXTS:
        _check(None if isinstance(request.get(name), str | None) else "it is no text", name)
    stamped = request.get("stamped_headers") or ()
    texts = isinstance(stamped, list | tuple) and all(isinstance(name, str) for name in stamped)
    _check(None if texts else "it is no list of texts", "stamped_headers")
    for name in ("stamps", "headers"):
        _check(None if isinstance(request.get(name), Mapping | None) else "it is no mapping", name)
    args, kwargs, embed = payload
    _check(None if isinstance(args, list | tuple) else "they are no list", "arguments")
    _check(None if isinstance(kwargs, Mapping) else "they are no mapping", "keyword arguments")
    _check(_why_no_options(embed), "options")


def _check(problem: str | None, what: str) -> None:
    if problem is not None:
        raise InvalidTaskError(f"{what} of the message: {problem}")


def _why_no_id(task_id: Any) -> str | None:
    if not isinstance(task_id, str) or not task_id:
        return "it is no text"
    return why_not_storable(task_id, max_length=MOST_OF_ID)


def _why_no_options(options: Any) -> str | None:
    if not isinstance(options, Mapping | None):
        return "they are no mapping"
    options = options or {}
    wrong = [name for name in options if not isinstance(name, str) or name in NO_OPTIONS or name.startswith(OURS)]
    if wrong:
        return f"they may not say {str(wrong[0])[:60]!a}"
    no_list = [name for name in LISTS if isinstance(options.get(name), str | bytes | Mapping)]
    return f"{no_list[0]} is no list" if no_list else None

"""A message that a worker has received: checks whether it can be run, and declines one that this worker cannot run.

One that cannot be run raises Celery's InvalidTaskError. A worker declines a message if it does not know the task, or
cannot read it: workers of two versions serve a queue while a deploy is rolled out, and the message may be for those of
the other version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery.exceptions import InvalidTaskError, NotRegistered

from ...model.checks import is_number
from ...model.durable import ADOPTED, CALL, DIGEST, HELD, WORKER, Address, Death, is_newer, key_of, why_no_header
from ...model.durable import HEADER as DURABLE
from ...model.logger import logger
from ...model.messages import is_readable, why_no_doorbell
from ...model.names import why_not_name, why_not_storable
from ...operations import waiting
from ...operations.ledger import burials
from ...services.heartbeat.heartbeat import Heartbeat
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ..messages.carried import CELERYS
from ..messages.doorbell import HEADER
from ..messages.kept_message import content_of, received

OF_THE_PARENT = (WORKER, ADOPTED, HELD, DIGEST)
"""Keys by which the worker's parent process tells the pool's something; headers of a message may have such names."""
TEXTS = (
    "shadow", "root_id", "parent_id", "group", "argsrepr", "kwargsrepr", "lang", "origin", "reply_to", "compression",
)  # fmt: skip
LISTS = ("callbacks", "errbacks", "chain")
"""Options that list calls. Celery would take each letter of a text for one, and send as many messages."""
OURS = "sidejob"
"""How names of ours begin."""
NO_OPTIONS = CELERYS | {
    "args", "kwargs", "hostname", "is_eager", "called_directly", "headers", "properties", "delivery_info", "reply_to",
    "correlation_id",
}  # fmt: skip
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


def decline(consumer: Any, message: Any, error: BaseException, is_unknown: bool) -> bool:
    """Have the work wait for another worker as soon as that can be done; False if no store of this worker has it.

    The message is acknowledged: nobody else needs it. If the worker dies before the work is declined, the message
    counts as missing, and is sent again. So is one of a newer format, of which this version cannot tell whose it is.
    """
    headers = message.headers if isinstance(message.headers, Mapping) else {}
    task, row = headers.get("task"), _row_of(headers)
    found = holders(consumer.app, headers.get(DURABLE))
    if row is None or not isinstance(task, str) or not found:
        return False
    message.ack_log_error(logger, consumer.connection_errors)
    if row[1] is None:
        logger.warning("A message of %s is left to newer workers: it is of a newer format", task)
        return True
    unread = None if is_unknown else error
    for heartbeat in found:
        heartbeat.errands.soon(partial(decline_in, consumer.app, heartbeat, row, message, task, unread))
    return True


def _row_of(headers: Mapping[str, Any]) -> tuple[Kind, Any] | None:
    """Return the kind and the key of the row that a message leads to: no key if it is of a newer format."""
    bell, durable = headers.get(HEADER), headers.get(DURABLE)
    if bell is not None and why_no_doorbell(bell) is None:
        return JOBS, (bell["job"], bell["for_run"]) if is_readable(bell) else None
    if durable is not None and why_no_header(durable) is None:
        return TASKS, None if is_newer(durable) else key_of(str(headers.get("id")), durable)
    return None


def decline_in(
    app: Any, heartbeat: Heartbeat, row: tuple[Kind, Any], message: Any, task: str, unread: BaseException | None
) -> None:
    """Have one store's row wait; if all have declined a durable task for too long, it ends as a failure.

    After a death before the burial, or while its result cannot be stored, its message is sent again and declined again.
    """
    error = unread or NotRegistered(f"no worker that got its message knows {task!r}")
    shown, runtime, (kind, key) = f"{type(error).__name__}: {error}", heartbeat.runtime, row
    if not waiting.decline(runtime, kind, key, task=task, unread=shown if unread else None):
        return
    death, content = Death("failed", shown), content_of(message)
    verdict, riders = runtime.results.tell_of_doom(
        received(app, task, message), death.reason, shown, place=runtime.store.place, failure=error
    )
    if verdict == "bury":
        address = Address.of(message.headers.get(DURABLE))
        heartbeat.tasks.fail(key, death, address=address, content=content, riders=riders)
    elif verdict == "remove":
        burials.forget(runtime, key, content)


def holders(app: Any, header: Any) -> Sequence[Heartbeat]:
    """Return the heartbeats that a message concerns: of the stores in which its row may be.

    None where this is no worker's parent process.
    """
    known: Sequence[Heartbeat] = getattr(getattr(app, "sidejob", None), "heartbeats", ())
    if header is None:
        return known[:1]  # without a row it gets one in the primary
    store = Address.of(header).store
    return [heartbeat for heartbeat in known if heartbeat.runtime.store.name == store] or known

"""A message in a worker that cannot run it: the worker does not know its task, or cannot read it.

Workers of two versions serve a queue while a deploy is rolled out. The message may be for those of the other version.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from celery.exceptions import NotRegistered

from ...model.durable import HEADER as DURABLE
from ...model.durable import Address, Death, is_newer, key_of, why_no_header
from ...model.logger import logger
from ...model.messages import is_readable, why_no_doorbell
from ...operations import waiting
from ...operations.ledger import burials
from ...services.heartbeat.heartbeat import Heartbeat
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ..messages.doorbell import HEADER
from ..messages.kept_message import content_of, received
from ..patches import celery_worker
from .delivered import holders


def install(consumer: Any) -> None:
    """Have a consumer's worker decline such messages."""
    celery_worker.refuse_by(consumer, partial(_decline, consumer))


def _decline(consumer: Any, message: Any, error: BaseException, is_unknown: bool) -> bool:
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

"""Tasks that the caller treats as durable and this worker does not: the worker runs them without locking their rows."""

from __future__ import annotations

from typing import Any

from celery import signals, states

from ...model.durable import HEADER, Address, Death, key_of
from ...model.errors import SettingsError, StoreUnavailableError
from ...model.logger import logger
from ...operations.ledger import burials
from ...operations.ledger.durable_locks import is_forged
from .. import bodies
from ..apps import runtime_for
from .beginning import content_of
from .durable_task import DurableTask
from .ending import error_text


def install() -> None:
    """Listen to Celery's signals about a task's end; a second call has no effect."""
    signals.task_postrun.connect(_end, weak=False, dispatch_uid="celery_sidejob.durable_elsewhere")


def _end(sender: Any = None, retval: Any = None, state: str | None = None, **_: Any) -> None:
    """End the row of such a task. Otherwise the message would be published again, and the task run, for ever."""
    request, app = sender.request, sender.app
    header = request.get(HEADER)
    if header is None or isinstance(sender, DurableTask) or getattr(app, "sidejob", None) is None:
        return
    key = key_of(request.id, header)
    if key is None or state not in states.READY_STATES | {states.IGNORED}:
        return
    if sender.name not in _told:
        _told.add(sender.name)
        logger.warning(
            "%s is durable for who called it, and not in this worker: it runs without a lock. Say durable=True where "
            "the task is made, or name it in sidejob_durable_tasks here too.",
            sender.name,
        )
    runtime, address, content = runtime_for(app, f"{sender.name} is durable"), Address.of(header), content_of(request)
    try:
        for there in runtime.of_row(address.store):
            if state == states.FAILURE:
                death = Death(
                    "failed",
                    error_text(retval),
                    bodies.traceback_of(retval),
                    request.retries or 0,
                    bodies.group_of(retval),
                )
                ended = burials.fail(there, key, death, by="sweeper", worker_id=None, content=content)
            else:
                ended = burials.forget(there, key, content)
            if not ended:
                is_forged(there, key, content)
    except (StoreUnavailableError, SettingsError) as error:
        logger.warning("The end of task %s could not be written; it will run once more: %s", key[0], error)


_told: set[str] = set()
"""The names of the tasks that were warned about."""

"""Celery's remote control, with revocations that are kept in the store before the workers are told.

`app.control.revoke`, `result.revoke()`, groups, `celery control revoke` and monitors all end in `broadcast`. A worker
forgets its revocations when it restarts; the store does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from uuid import UUID

from celery import Celery
from celery.app.control import Control
from kombu import Producer
from kombu.exceptions import OperationalError
from kombu.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name

from ..model.checks import shown
from ..model.errors import InvalidValueError, StoreUnavailableError
from ..model.logger import logger
from ..operations.ledger import burials
from .broker.connection import connection_to, established
from .patches import above

KEPT = frozenset({"revoke", "terminate"})
"""The commands that revoke by task id."""

ATTEMPT_S = 3.0
TOLD_FOR_S = 1.0
"""Seconds after which a worker ignores a command: kombu makes this the message's `expires`."""


def install(app: Celery) -> None:
    """Keep revocations in the store, whatever code asks for them; reads no configuration."""
    found = app.__dict__.get("control")
    if found is not None:  # it was used before
        found.__class__ = above(KeepingControl, type(found))
    elif not (isinstance(app.control_cls, partial) and app.control_cls.func is make):
        app.control_cls = partial(make, app.control_cls)  # pickled for a spawned process: a new class could not be


def make(base: Any, **options: Any) -> Any:
    """Make the app's control, of its own class combined with `KeepingControl`."""
    return above(KeepingControl, symbol_by_name(base))(**options)


class KeepingControl(Control):
    """Celery's control; a revocation of durable tasks outlives the workers that were notified."""

    def broadcast(
        self, command: str, arguments: Any = None, destination: Any = None, *args: Any, **options: Any
    ) -> Any:
        """Broadcast a command; a revocation for all workers is kept first.

        Raises StoreUnavailableError if it could not be kept, after the workers were told. If it is kept and the workers
        cannot be told, it is valid all the same, and a warning is logged. But if only workers can do the rest, such as
        terminate a run, it raises OperationalError then.
        """
        trouble, kept, given = None, False, {**(arguments if isinstance(arguments, Mapping) else {}), **options}
        if command in KEPT and not destination and not options.get("pattern"):
            ids = maybe_list(given.get("task_id")) or ()
            for one in ids:
                if not isinstance(one, str | UUID):
                    raise InvalidValueError(f"revoke() takes ids of tasks, not {shown(one)}.")
            trouble, kept = self._keep(map(str, ids))
        try:
            answer = super().broadcast(command, arguments, destination, *args, **options)
        except (OperationalError, OSError) as error:
            if not kept:
                raise
            if command == "terminate" or given.get("terminate") or options.get("reply"):
                raise OperationalError(NOT_TERMINATED.format(error=error)) from error
            logger.warning(NOT_TOLD.format(error=error))
            return None
        if trouble is not None:
            raise trouble
        return answer

    def tell_of_revocation(self, task_ids: Iterable[str], *, terminate: bool = False) -> None:
        """Tell the workers of a revocation that is already kept; with `terminate` they kill the tasks' processes."""
        self._tell("revoke", {"task_id": list(task_ids), "terminate": terminate, "signal": "SIGKILL"})

    def kill_run(self, job_id: int, run_no: int) -> None:
        """Tell the workers to kill the process of a job's run."""
        self._tell("sidejob_kill_run", {"job_id": job_id, "run_no": run_no})

    def _tell(self, command: str, arguments: Mapping[str, Any]) -> None:
        """Broadcast to the workers; raises the broker's error within seconds.

        Celery's own broadcast would try a silent broker again for ever.
        """
        *others, last = self.app.connection_for_write().alt or [None]
        for node in others:
            try:
                return self._tell_once(command, arguments, node)
            except Exception as error:  # a transport may raise anything
                logger.warning("One of the brokers could not be told: %s: %s", type(error).__name__, error)
        self._tell_once(command, arguments, last)

    def _tell_once(self, command: str, arguments: Mapping[str, Any], node: str | None) -> None:
        """Broadcast in one attempt, on a separate connection."""
        with connection_to(self.app, ATTEMPT_S, node) as connection, established(connection, ATTEMPT_S) as made:
            channel = connection.transport.create_channel(made)
            once = _Once(channel, auto_declare=False)
            self.mailbox(connection)._publish(command, arguments, channel=channel, producer=once, timeout=TOLD_FOR_S)

    def _keep(self, task_ids: Iterable[str]) -> tuple[StoreUnavailableError | None, bool]:
        """Keep a revocation; return the error to raise, if any, and whether the store has all of these tasks."""
        sidejob, ids = self.app.sidejob, list(task_ids)
        if not ids or sidejob.settings.database_url is None:
            return None, False
        found = burials.revoke_in_all(sidejob.runtime, ids)
        if found.unfit is not None:
            logger.warning(NOT_KEPT_THERE.format(error=found.unfit))
        if found.unavailable is not None:
            refusal = StoreUnavailableError(NOT_KEPT.format(error=found.unavailable))
            if sidejob.settings.on_store_down != "publish":
                return refusal, False
            logger.warning("%s", refusal)
        return None, all(task_id in (*found.waiting, *found.running) for task_id in ids)


class _Once(Producer):
    """Publishes in one attempt, whatever the mailbox asks for."""

    def publish(self, *args: Any, retry: bool = False, **options: Any) -> Any:
        return super().publish(*args, retry=False, **options)


NOT_KEPT = (
    "The revocation was not kept, because the store is away. The workers that run now were told; a worker that starts "
    "later does not know of it. Revoke the task again when the store is back. ({error})"
)
NOT_TOLD = "The revocation is kept: waiting tasks do not run, although the workers could not be told. ({error})"
NOT_TERMINATED = (
    "The revocation is kept, but the workers could not be told: waiting tasks do not run, and running tasks are not "
    "terminated. Revoke them again when the broker is back. ({error})"
)
NOT_KEPT_THERE = "Only the workers that run now know of the revocation: {error}"

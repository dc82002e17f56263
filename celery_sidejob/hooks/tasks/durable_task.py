"""The class of durable tasks, and a run in its process: lock, body, result, end.

Celery's tracer does the work. This module adds code at its beginning (`before_start`), around the body (`__call__`),
and, by the signals of the task, at its end (`ending`).
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from ...jobs.capacity import CapacityPool
from ...operations.ledger.durable_runs import in_body
from .. import bodies
from ..durability import lost_policy
from ..on_commit import OnCommit
from ..worker import own_process
from . import beginning, ending, telling
from .present import run_of


class DurableTask(OnCommit):
    """A marker base of ordinary tasks whose messages are kept until the tasks are done.

    The final class is (marker, the task's own class). `on_lost`: what happens after a run whose worker died,
    ``"requeue"`` or ``"dead"``; the default is the first for tasks with `acks_late` and `reject_on_worker_lost`, by
    which their author declares them repeatable, otherwise the second. `max_losses`: how many runs may be lost.
    `capacity`: the pool in which each message takes a slot.
    """

    abstract = True
    durable: bool | None = True
    on_lost: str | None = None
    max_losses: int | None = None
    capacity: CapacityPool | None = None
    Request = "celery_sidejob.hooks.tasks.durable_request:DurableRequest"

    @property
    def backend(self) -> Any:
        """The task's result backend, to which `telling` reports the outcome."""
        backend = super().backend
        if not hasattr(backend, "tells_of_durable_tasks"):
            telling.install(backend)
        return backend

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    @property
    def lost_policy(self) -> str:
        """Whether a lost run is repeated: ``requeue`` or ``dead``."""
        return lost_policy(self)

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Lock the task's row; a copy of a running or finished task ends here."""
        request = self.request
        if not request.is_eager and not request.called_directly:
            beginning.begin(self, request)
        super().before_start(task_id, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        run = run_of(self)
        if run is None or run.body_is_over or run.in_body:
            with in_body(None):
                return super().__call__(*args, **kwargs)
        run.in_body = True
        try:
            with in_body(run):
                value = self._body(*args, **kwargs)
        except BaseException as error:
            place = run.runtime.store.place
            if own_process.is_left(self.app, run.key, error, place=place):
                ending.lose(run, error, own_process.ident(self.app, place=place))
            if isinstance(error, Exception) and not isinstance(error, Ignore | Reject | Retry):
                run.error = error
                ending.check_that_it_counts(run, error)
            raise
        run.body_is_over = True
        if ending.is_awaited(self, run):
            ending.check_that_it_counts(run)
        return value

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        call = bodies.call_of(self, DurableTask)
        value = self.run(*args, **kwargs) if call is None else call(self, *args, **kwargs)
        return bodies.result_of(value, f"The body of {self.name}")

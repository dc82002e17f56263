"""The class of durable tasks, which tasks of an app get it, and a run in its process: lock, body, result, end.

Celery's tracer does the work. This module adds code at its beginning (`before_start`), around the body (`__call__`),
and, by the signals of the task, at its end (`durable_run`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery, signals, states
from celery.app.task import Task
from celery.exceptions import Ignore, Reject, Retry

from ...jobs.capacity import CapacityPool
from ...model.checks import check_function
from ...model.durable import HEADER, Address, key_of
from ...model.errors import SettingsError, StoreUnavailableError
from ...model.logger import logger
from ...operations.ledger import burials
from ...operations.ledger.durable_runs import in_body, is_forged
from ...pools.coroutines import let_run
from .. import bodies
from ..apps import runtime_for
from ..bodies import OnCommit, made_early
from ..patches import app_methods, become
from ..task_options import OF_ORDINARY_TASKS, check_task, is_durable, known_tasks, lost_policy
from ..worker import pool_process
from . import durable_run, results
from .durable_run import content_of, death_of
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
        """The task's result backend, to which `results` reports the outcome."""
        return results.install(super().backend)

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
            durable_run.begin(self, request)
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
            if pool_process.is_left(self.app, run.key, error, place=place):
                durable_run.lose(run, error, pool_process.ident(self.app, place=place))
            if isinstance(error, Exception) and not isinstance(error, Ignore | Reject | Retry):
                run.error = error
                durable_run.check_that_it_counts(run, error)
            raise
        run.body_is_over = True
        if durable_run.is_awaited(self, run):
            durable_run.check_that_it_counts(run)
        return value

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        call = bodies.call_of(self, DurableTask)
        value = self.run(*args, **kwargs) if call is None else call(self, *args, **kwargs)
        return bodies.result_of(value, f"The body of {self.name}")


def mark(app: Celery) -> None:
    """Turn each durable task of the app into a `DurableTask`, if it is not one already; let each `async def` run."""
    for task in list(known_tasks(app).values()):
        let_run(task)
        if isinstance(task, DurableTask) or is_durable(app, task.name):
            _mark(app, task)


def watch_tasks(app: Celery) -> None:
    """Refuse wrong options of all tasks, and mark tasks that are made after the app is finalized.

    Modules that are imported late make such tasks. An error in the finalization of an app is raised again at each use
    of its tasks.
    """

    def check_all() -> None:
        for task in list(known_tasks(app).values()):
            _check(app, task)

    app_methods.tell_of_tasks(app, made=partial(_mark_if_final, app), completed=check_all)


def _mark_if_final(app: Celery, task: Any) -> Any:
    let_run(task)  # eager mode may call it before the app is finalized
    if app.finalized:
        _check(app, task)
        if is_durable(app, task.name):
            _mark(app, task)
        return task
    return made_early(task)


def _check(app: Celery, task: Any) -> None:
    if getattr(task, "sidejob", False):
        return
    check_task(app, task)
    if is_durable(app, task.name) and bodies.call_of(task, DurableTask) is None:
        body = getattr(task, "_orig_run", task.run)  # without the wrapper of autoretry_for
        check_function(body, f"The body of {task.name}, which is durable,")


def _mark(app: Celery, task: Any) -> None:
    cls = type(task)
    if isinstance(task, DurableTask):
        if not isinstance(task, app.Task):  # made with base=DurableTask: the project's own class belongs below it
            become(task, cls, app.Task)
        return
    options = {name: getattr(task, name) for name in OF_ORDINARY_TASKS if hasattr(task, name)}
    # A custom Request of the task's own class would not get the facts that a row needs.
    if task.Request != Task.Request:
        raise SettingsError(f"{task.name} is durable and has a Request of its own ({task.Request}): use either.")
    become(task, DurableTask, cls, **options, abstract=True)


def end_rows_of_others() -> None:
    """End the rows of tasks that their caller treats as durable and this worker does not; twice has no further effect.

    The worker runs them without locking their rows, and Celery's signal tells of their end.
    """
    signals.task_postrun.connect(_end_row_of_another, weak=False, dispatch_uid="celery_sidejob.durable_elsewhere")


def _end_row_of_another(sender: Any = None, retval: Any = None, state: str | None = None, **_: Any) -> None:
    """End the row of a task that is durable for its caller alone.

    Otherwise the message would be published again, and the task run, for ever.
    """
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
                death = death_of(retval, request)
                ended = burials.fail(there, key, death, by="sweeper", worker_id=None, content=content)
            else:
                ended = burials.forget(there, key, content)
            if not ended:
                is_forged(there, key, content)
    except (StoreUnavailableError, SettingsError) as error:
        logger.warning("The end of task %s could not be written; it will run once more: %s", key[0], error)


_told: set[str] = set()
"""The names of the tasks that were warned about."""

"""A run of an ordinary durable task in its process: lock, body, result, end.

Celery's tracer does the work; this stands at its beginning (`before_start`), around the body (`__call__`), and, by the
signals of the task, at its end. The end comes after the result was stored and before a late acknowledgement.
"""

from __future__ import annotations

import logging
import os
import random
import time
import traceback as tracebacks
from contextlib import suppress
from typing import Any, NoReturn, cast

from celery import Celery, signals, states
from celery.app.task import Context, Task
from celery.exceptions import Ignore, Reject

from ..model.durable import HEADER, Key, Message, key_of
from ..model.errors import LeaseLostError, SchemaError, SettingsError, StoreUnavailableError
from ..operations import durable
from ..operations.durable import Run
from ..operations.runtime import Runtime
from . import own_process, recording
from .durable import RUNS, check_options, is_durable
from .publishing import PAUSE_S
from .run import WORKER

logger = logging.getLogger("celery_sidejob")

ADOPTED = "sidejob_adopted"
"""The request's key for the whole message of a publisher without this package; set by the parent."""


class DurableTask(Task):
    """A marker base of ordinary tasks whose messages are kept until they are done.

    The class that is built from it is (marker, the task's own class). `on_lost`: what becomes of a run whose worker
    died, ``"requeue"`` or ``"dead"``; by default the first only for tasks that are `acks_late` with
    `reject_on_worker_lost`, whose author so has called them repeatable. `max_losses`: runs that may be lost.
    """

    abstract = True
    durable: bool | None = True
    on_lost: str | None = None
    max_losses: int | None = None
    Request = "celery_sidejob.hooks.durable_request:DurableRequest"

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options, however the task is registered."""
        super().on_bound(app)
        check_options(cls)

    @property
    def lost_policy(self) -> str:
        """What becomes of a run whose worker died."""
        return self.on_lost or ("requeue" if self.acks_late and self.reject_on_worker_lost else "dead")

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task in Django's transaction: `apply_async_on_commit`, for Celery's task of Django."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Call the task as part of Django's transaction, if that is in the store's database; returns its result.

        Where Django's default database is another one, it is called just after the commit, as Celery does.
        """
        above = super()
        if not hasattr(above, "apply_async_on_commit"):
            raise AttributeError(
                f"{self.name}.apply_async_on_commit() is for tasks of Django; use apply_async(transaction=...)."
            )
        from django.db import connection

        if connection.vendor == "postgresql" and not self._get_app().conf.task_always_eager:
            with suppress(SchemaError):
                return self.apply_async(args, kwargs, transaction=connection, **options)
        return above.apply_async_on_commit(args, kwargs, **options)

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Lock the task's row; a copy of what runs or was finished goes no further than this."""
        request = self.request
        if not request.is_eager and not request.called_directly:
            _begin(self, request)
        super().before_start(task_id, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        run = run_of(self)
        if run is None or run.body_is_over or run.in_body:
            return super().__call__(*args, **kwargs)
        run.in_body = True
        try:
            value = self._body(*args, **kwargs)
        except BaseException as error:
            if own_process.is_left(self.app, run.key, error):
                _lose(_runtime(self), run, error)
            raise
        run.body_is_over = True
        return value

    def _body(self, *args: Any, **kwargs: Any) -> Any:
        mro = type(self).__mro__
        for cls in mro[mro.index(DurableTask) + 1 :]:
            if cls is not Task and "__call__" in cls.__dict__:
                return cls.__call__(self, *args, **kwargs)
        return self.run(*args, **kwargs)


def mark(app: Celery) -> None:
    """Make a `DurableTask` of each task of the app that is durable, and was not made so before."""
    for task in list(app._tasks.values()):
        if isinstance(task, DurableTask) or is_durable(app, task.name):
            _mark(app, task)


def mark_later_ones(app: Celery) -> None:
    """Have tasks marked too that are made once the app is finalized, as modules that are imported late make them."""
    make, register = app._task_from_fun, app.register_task

    def make_and_mark(*args: Any, **options: Any) -> Any:
        return _mark_if_final(app, make(*args, **options))

    def register_and_mark(task: Any, **options: Any) -> Any:
        return _mark_if_final(app, register(task, **options))

    app._task_from_fun, app.register_task = make_and_mark, register_and_mark


def _mark_if_final(app: Celery, task: Any) -> Any:
    if app.finalized and is_durable(app, task.name):
        _mark(app, task)
    return task


def _mark(app: Celery, task: Any) -> None:
    cls = type(task)
    if isinstance(task, DurableTask):
        if not isinstance(task, app.Task):  # made with base=DurableTask: the project's own class belongs below it
            task.__class__ = type(cls.__name__, (cls, app.Task), {"__module__": cls.__module__})
        return
    options = {name: getattr(task, name) for name in ("durable", "on_lost", "max_losses") if hasattr(task, name)}
    # A custom Request of the task's own class would not be told what a row needs.
    if task.Request != Task.Request:
        raise SettingsError(f"{task.name} is durable and has a Request of its own ({task.Request}): use either.")
    marked = type(cls.__name__, (DurableTask, cls), {**options, "__module__": cls.__module__, "abstract": True})
    check_options(marked)
    task.__class__ = marked


def install() -> None:
    """Listen to what Celery tells of a task's end; twice does no harm."""
    signals.task_success.connect(_succeeded, weak=False, dispatch_uid="celery_sidejob.durable")
    signals.task_failure.connect(_failed, weak=False, dispatch_uid="celery_sidejob.durable")
    signals.task_postrun.connect(_over, weak=False, dispatch_uid="celery_sidejob.durable")


def run_of(task: Any) -> Run | None:
    """Return the run that the task's present request is, if it has begun one."""
    found: Run | None = getattr(getattr(task, "request", None), "sidejob_run", None)
    return found


# -- the beginning ---------------------------------------------------------------------------------------------------


def _begin(task: DurableTask, request: Context) -> None:
    runtime = _runtime(task)
    recording.begin(task.app)
    worker_id = request.get(WORKER)
    key = key_of(request.id, request.get(HEADER))
    if worker_id is None:
        _back(request, "this worker has no identity in the store yet")
    if key is not None and own_process.is_revoked(task.app, request.id):
        _revoked(task, request, key, worker_id)
    adopted = request.get(ADOPTED) if key is None else None
    run = Run(key or (request.id, 1), task.name, worker_id)
    policy: dict[str, Any] = {
        "pid": os.getpid(), "on_lost": task.lost_policy, "max_losses": task.max_losses or runtime.settings.max_losses,
    }  # fmt: skip
    try:
        if key is not None:
            begun = durable.begin(runtime, run, is_here=request.id in RUNS, **policy)
        elif adopted is not None:
            begun = durable.adopt(runtime, run, cast("Message", adopted), **policy)
        else:
            _back(request, "its message is of a newer format")
    except StoreUnavailableError as error:
        time.sleep(random.uniform(*PAUSE_S))  # else it would come and go without end
        _back(request, str(error))
    if not begun:
        raise Ignore(f"task {request.id}: a copy of what runs, was finished, or is in the dead set")
    RUNS[request.id] = run
    request.sidejob_run = run  # the request's own: another delivery of this id may come and go in another thread


def _revoked(task: DurableTask, request: Context, key: Key, worker_id: int) -> NoReturn:
    """Bury what was revoked while it waited for a thread, unless the worker does."""
    error = "TaskRevokedError: the task was revoked"
    if not own_process.is_ended(task.app, key) and durable.fail(
        _runtime(task), key, by="worker", worker_id=worker_id, reason="revoked", error=error
    ):
        task.backend.mark_as_revoked(request.id, "revoked", request=request)
    raise Ignore(f"task {request.id} was revoked")


def _back(request: Context, why: str) -> NoReturn:
    """Have the message given back to the broker; what was acknowledged already is found by the sweeper."""
    logger.warning("Task %s does not begin and goes back to the broker: %s", request.id, why)
    raise Reject(why, requeue=True)


def _lose(runtime: Runtime, run: Run, error: BaseException) -> NoReturn:
    """A body has left a process that goes on: what it held is as good as lost with it."""
    logger.error("The run of task %s is lost: its body raised %r", run.key[0], error)
    run.is_lost = True
    with suppress(StoreUnavailableError):  # otherwise the worker finds what it holds and does not run
        durable.give_back(runtime, [run.key[0]], worker_id=run.worker_id, loss=True)
    raise Ignore(f"task {run.key[0]}: its body left") from None


# -- the end ---------------------------------------------------------------------------------------------------------


def _succeeded(sender: Any = None, **_: Any) -> None:
    run = run_of(sender)
    if run is not None:
        run.result_is_stored = True


def _failed(sender: Any = None, einfo: Any = None, **_: Any) -> None:
    run = run_of(sender)
    if run is not None:
        run.traceback = str(einfo.traceback) if einfo is not None else None


def _over(sender: Any = None, retval: Any = None, state: str | None = None, **_: Any) -> None:
    run = run_of(sender)
    if run is None:
        return
    try:
        _end(_runtime(sender), run, sender.request, state, retval)
    except LeaseLostError as error:
        logger.warning("%s", error)
    except StoreUnavailableError as error:
        # The row stays held, and is found by the worker, which does not run it any more: as if it had been lost.
        logger.error("The end of task %s could not be written: %s", run.key[0], error)
    finally:
        RUNS.pop(run.key[0], None)


def _end(runtime: Runtime, run: Run, request: Context, state: str | None, retval: Any) -> None:
    if run.moved or run.is_lost or state is None:
        return  # it goes on as another message; or this process is about to end, and the worker sees to it
    if state == states.IGNORED or (state == states.SUCCESS and run.result_is_stored):
        durable.end(runtime, run)
    elif state == states.REJECTED and getattr(retval, "requeue", False):
        durable.put_back(runtime, run)
    else:
        error = retval if isinstance(retval, BaseException) else None
        durable.fail(
            runtime, run.key, by="run", worker_id=run.worker_id, reason="failed", retries=request.retries or 0,
            error=_shown(error, state), traceback=run.traceback or _trace(error), patient=True,
        )  # fmt: skip


def _shown(error: BaseException | None, state: str) -> str:
    if error is None:
        return f"ResultNotStored: the body ended as {state}, and its result could not be stored"
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: <its str() raises>"


def _trace(error: BaseException | None) -> str | None:
    return None if error is None else "".join(tracebacks.format_exception(error))


def _runtime(task: Any) -> Runtime:
    sidejob = getattr(task.app, "sidejob", None)
    if sidejob is None:
        raise SettingsError(f"{task.name} is durable, but its app has no SideJob: call SideJob(app).")
    return cast("Runtime", sidejob.runtime)

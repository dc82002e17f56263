"""The task class of sidejob tasks, and the decorators that make them.

Importing a decorated module creates no app, reads no configuration and connects to nothing: the task is built when an
app finalizes, from what was noted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from celery import Celery, _state
from celery.app import base as celery_app
from celery.app.task import Task
from celery.exceptions import MaxRetriesExceededError
from celery.local import PromiseProxy, Proxy

from ..job import Job, enqueue
from ..model.errors import IllegalMoveError, SchemaError, SettingsError
from ..model.port import PortOptions, parse_ports
from ..running import RetryRun, RunningJob
from .calls import check_arguments
from .publishing import HEADER

if TYPE_CHECKING:
    from ..operations.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")

LATER_OPTIONS = frozenset({"run_rate", "on_run_rate", "publish_status", "capacity", "durable"})

SENDING_OPTIONS = frozenset({"queue", "exchange", "exchange_type", "routing_key", "delivery_mode", "priority"})
"""Set after Celery has bound the task: it warns of them before, because Celery 6 wants routes instead. Ours stay."""


class SideJobTask(Task):
    """A marker base: the class that is built from it is (marker, the app's own Task), so the project's stays in place.

    Subclass it for a task that is a class: ``name``, ``inports``, ``outports``, ``startup``, ``run``, ``shutdown``.
    """

    abstract = True
    sidejob = True
    Request = "celery_sidejob.hooks.request:JobRequest"
    acks_late = False  # the store holds the job from the claim on, whatever the app's default says
    track_started = False

    inports: Any = ()
    outports: Any = ()
    max_losses: int | None = None
    on_lost = "requeue"
    retention: float | timedelta | None = None
    lease_renewal = "auto"
    lease: float | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options of a task that is a class, however it is registered."""
        super().on_bound(app)
        _check({name: getattr(cls, name) for name in OPTIONS_OF_CLASSES if getattr(cls, name, None) is not None})

    @property
    def parsed_inports(self) -> Mapping[str, PortOptions]:
        """The input ports every job of this task has."""
        return parse_ports(self.inports, where=f"inports of {self.name}")

    @property
    def parsed_outports(self) -> Mapping[str, PortOptions]:
        """The output ports every job of this task has."""
        return parse_ports(self.outports, where=f"outports of {self.name}")

    @property
    def losses_allowed(self) -> int | None:
        """How many runs in a row may be lost before a job fails; ``on_lost="dead"`` allows none to be repeated."""
        return 1 if self.on_lost == "dead" else self.max_losses

    @property
    def retention_s(self) -> float | None:
        """How long finished jobs are kept, in seconds; None for the setting's time."""
        kept = self.retention
        return kept.total_seconds() if isinstance(kept, timedelta) else kept

    # -- what a class-based task overrides -----------------------------------------------------------------------

    def startup(self, job: RunningJob) -> None:
        """Is called before the first run, and committed with it."""

    def shutdown(self, job: RunningJob) -> None:
        """Is called when the job is terminated; what it raises is logged, and the job is terminated all the same."""

    # -- asking --------------------------------------------------------------------------------------------------

    def enqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, *positional: Any, **options: Any) -> Job:
        """Make a job of this task; the parameters are those of `sidejob.enqueue`."""
        if positional or not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping | None):
            loose = (args, *((kwargs,) if kwargs is not None else ()), *positional)
            given = ", ".join(map(repr, loose))
            raise TypeError(
                f"{self.name}.enqueue({given}): the task's arguments go into one tuple: enqueue({loose!r}); "
                f"or call delay({given})."
            )
        return enqueue(self._runtime, self, args, kwargs, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and return a Celery result of its first asking, with the job as ``.job``."""
        if self._get_app().conf.task_always_eager:
            from .eager import apply_eagerly

            return apply_eagerly(self, args or (), kwargs, options)
        options = {**self._get_exec_options(), **options}
        options.pop("task_type", None)
        options.pop("priority", None) if options.get("priority") is None else None
        transaction = options.pop("transaction", None)
        repeated = self._repeated(options.get("task_id"))
        job = repeated or enqueue(self._runtime, self, args or (), kwargs, transaction=transaction, **options)
        result = self.AsyncResult(options.get("task_id") or job.task_id)
        result.job = job
        return result

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and run it here, with its children and wakes, until all is quiet."""
        from .eager import apply_eagerly

        return apply_eagerly(self, args or (), kwargs, options)

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Make a job with these arguments; the short form of `apply_async`."""
        return self.apply_async(args, kwargs)

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> Any:
        """Make a job in Django's transaction: `delay` with ``transaction="default"``, for Celery's task of Django."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job that is there when Django's transaction commits: as part of it, if it is in the store's database.

        Where Django's default database is another one, the job is made just after the commit, as Celery does.
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

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError for arguments the body does not take; the running job is not among them."""
        if self.typing:
            check_arguments(self.run, self.name, args, kwargs)

    def _repeated(self, task_id: str | None) -> Job | None:
        """Return the job that an earlier attempt to publish this very continuation made."""
        if task_id is None:
            return None
        found: Job | None = self._get_app().sidejob.for_task_id(task_id)
        return found

    # -- running -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker run the job that the delivery names; called by hand run the body with the job that is given."""
        from .run import adopt_delivery, run_delivery

        if args and isinstance(args[0], Job):
            return self.run_body(args[0], args[1:], kwargs)
        request = self.request
        if request.called_directly:
            raise TypeError(
                f"{self.name}(...) runs the body, and the body's first argument is a job: call it with one, or make a "
                f"job with {self.name.rpartition('.')[2]}.delay(...)."
            )
        if request.get(HEADER):
            return run_delivery(self, request)
        return adopt_delivery(self, request, args, kwargs)

    def run_body(self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        mro = type(self).__mro__
        for cls in mro[mro.index(SideJobTask) + 1 :]:
            if cls is not Task and "__call__" in cls.__dict__:
                return cls.__call__(self, job, *args, **kwargs)
        return self.run(job, *args, **kwargs)

    def retry(
        self, args: Any = None, kwargs: Any = None, exc: BaseException | None = None, throw: bool = True,
        eta: Any = None, countdown: float | None = None, max_retries: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Discard this run and try it again later; Celery's `retry`, as a backoff of the job's message in the store."""
        if args is not None or kwargs is not None:
            raise IllegalMoveError(
                f"{self.name}.retry() cannot change a job's arguments; keep what changes in its state."
            )
        if eta is not None:
            from datetime import UTC, datetime

            aware = self._get_app().sidejob.runtime.tasks.localize(eta)
            countdown = max(0.0, (aware - datetime.now(UTC)).total_seconds())
        again = RetryRun(exc, countdown, max_retries)
        if throw:
            raise again
        return again

    def retries_left(self, retries: int, max_retries: int | None) -> bool:
        """Tell whether a run that was retried so often may be retried once more."""
        most = max_retries if max_retries is not None else getattr(self, "override_max_retries", None)
        most = most if most is not None else self.max_retries
        return most is None or retries < most

    def out_of_retries(self, exc: BaseException | None) -> BaseException:
        """Return what the job fails with when its retries are used up."""
        return exc or MaxRetriesExceededError(f"Can't retry {self.name} any more.", task_args=(), task_kwargs={})

    @property
    def _runtime(self) -> Runtime:
        app = self._get_app()
        sidejob = getattr(app, "sidejob", None)
        if sidejob is None and celery_app.USING_EXECV:
            sidejob = extend_copy(app)
        if sidejob is None:
            raise SettingsError(f"{self.name} is a sidejob task, but its app has no SideJob: call SideJob(app).")
        return cast("Runtime", sidejob.runtime)


def extend_copy(app: Celery) -> Any:
    """Give the copy of an app that a spawned process was sent what the original has; set by the extension."""
    return None


class SharedSideJobTask(Proxy, Generic[P, R]):
    """What `@sidejob_task` returns: stands for the task of whatever app is current, and notes the job's hooks."""

    def on_startup(self, function: Callable[[RunningJob], None]) -> Callable[[RunningJob], None]:
        """Have `function` called before the first run, in its commit."""
        object.__getattribute__(self, "_noted")["startup"] = staticmethod(function)
        return function

    def on_shutdown(self, function: Callable[[RunningJob], None]) -> Callable[[RunningJob], None]:
        """Have `function` called when the job is terminated."""
        object.__getattribute__(self, "_noted")["shutdown"] = staticmethod(function)
        return function

    if TYPE_CHECKING:
        name: str

        def __call__(self, job: Job, *args: P.args, **kwargs: P.kwargs) -> R: ...
        def delay(self, *args: P.args, **kwargs: P.kwargs) -> JobResult[R]: ...
        def enqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Job: ...
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> JobResult[R]: ...
        def s(self, *args: Any, **kwargs: Any) -> Any: ...
        def si(self, *args: Any, **kwargs: Any) -> Any: ...
        def signature(self, *args: Any, **kwargs: Any) -> Any: ...


if TYPE_CHECKING:

    class JobResult(Generic[R]):
        """Celery's AsyncResult of an asking, with its job."""

        id: str
        job: Job

        def get(self, timeout: float | None = None, **options: Any) -> R: ...
        def ready(self) -> bool: ...
        @property
        def state(self) -> str: ...


@overload
def sidejob_task(function: Callable[Concatenate[RunningJob, P], R], /) -> SharedSideJobTask[P, R]: ...
@overload
def sidejob_task(
    **options: Any,
) -> Callable[[Callable[Concatenate[RunningJob, P], R]], SharedSideJobTask[P, R]]: ...
def sidejob_task(function: Any = None, /, **options: Any) -> Any:
    """Make a function (or a `SideJobTask` class) the body of durable jobs, for whatever app there is or will be.

    Every option of a Celery task is allowed; own ones are `inports`, `outports`, `max_losses`, `on_lost`,
    `retention`, and `lease_renewal` with `lease`. The function's first parameter is the running job; with
    ``bind=True`` the second.
    """
    return _shared(options)(function) if function is not None else _shared(options)


def task_of(app: Celery, function: Any = None, options: dict[str, Any] | None = None) -> Any:
    """Make a sidejob task of one app; what `@sidejob.task` does."""
    options = options or {}
    if celery_app.USING_EXECV:  # a spawned process of a pool works for a copy of the app: as Celery's own tasks there
        return _shared(options)(function) if function is not None else _shared(options)

    def decorate(body: Any) -> Any:
        noted: dict[str, Any] = {}
        checked = _check(options)
        name = _name_of(body, checked)

        with app._finalize_mutex:
            if app.finalized:
                build(app, body, name, checked, noted)
            else:  # with the app's other tasks: before any receiver of on_after_finalize, which may look for it
                app._pending.append(PromiseProxy(build, (app, body, name, checked, noted)))
        return _proxy(lambda: app.tasks[name or app.gen_task_name(body.__name__, body.__module__)], body, noted)

    return decorate(function) if function is not None else decorate


def _shared(options: dict[str, Any]) -> Callable[[Any], Any]:
    def decorate(body: Any) -> Any:
        if isinstance(body, Proxy):
            raise TypeError("@sidejob_task was applied to what is a task already; remove one of the decorators.")
        noted: dict[str, Any] = {}
        checked = _check(options)
        name = _name_of(body, checked)
        _state.connect_on_app_finalize(lambda app: build(app, body, name, checked, noted))
        for app in _state._get_active_apps():
            if app.finalized:
                with app._finalize_mutex:
                    build(app, body, name, checked, noted)

        def find() -> Any:
            app = _state.get_current_app()
            return app.tasks[name or app.gen_task_name(body.__name__, body.__module__)]

        return _proxy(find, body, noted)

    return decorate


def _proxy(find: Callable[[], Any], body: Any, noted: dict[str, Any]) -> Any:
    proxy: Any = SharedSideJobTask(find, __doc__=body.__doc__)
    object.__setattr__(proxy, "_noted", noted)
    return proxy


def build(app: Celery, body: Any, name: str | None, options: dict[str, Any], noted: dict[str, Any]) -> Any:
    """Build and register the task for one app; `noted` are the hooks, also those that are given after this."""
    options = dict(options)
    base = options.pop("base", None) or app.Task
    sent = {option: options.pop(option) for option in SENDING_OPTIONS & options.keys()}
    if isinstance(body, type):
        task_class = type(body.__name__, (body, base), {**options, "__module__": body.__module__, "abstract": False})
        task = task_class()
        task.name = name or app.gen_task_name(body.__name__, body.__module__)
        app.register_task(task)
    else:
        marked = base if issubclass(base, SideJobTask) else type("SideJobTask", (SideJobTask, base), {"abstract": True})
        task = app._task_from_fun(body, name=name, base=marked, **options)
    for option, value in sent.items():
        setattr(type(task), option, value)
    task._hooks = noted
    return task


OPTIONS_OF_CLASSES = LATER_OPTIONS | {
    "inports", "outports", "lease_renewal", "lease", "max_losses", "on_lost", "retention",
}  # fmt: skip


def hook_of(task: Any, which: str) -> Callable[[RunningJob], None]:
    """Return a task's startup or shutdown: the decorated function, or the class's method."""
    noted = getattr(task, "_hooks", {}).get(which)
    found: Callable[[RunningJob], None] = noted.__func__ if noted is not None else getattr(task, which)
    return found


def _name_of(body: Any, options: dict[str, Any]) -> str | None:
    return options.pop("name", None) or (getattr(body, "name", None) if isinstance(body, type) else None)


def _check(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse wrong own options where they stand, before any app exists."""
    for name in sorted(LATER_OPTIONS & options.keys()):
        raise SettingsError(f"The task option {name!r} is not supported yet.")
    parse_ports(options.get("inports", ()), where="inports")
    parse_ports(options.get("outports", ()), where="outports")
    renewal = options.get("lease_renewal", "auto")
    if renewal not in ("auto", "manual"):
        raise SettingsError(f"lease_renewal is 'auto' or 'manual', not {renewal!r}.")
    if (renewal == "manual") != (options.get("lease") is not None):
        raise SettingsError('lease= is the deadline of a run with lease_renewal="manual": give both, or neither.')
    losses = options.get("max_losses")
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, int) or losses < 1):
        raise SettingsError(f"max_losses is a number of runs, at least 1, not {losses!r}.")
    if options.get("on_lost", "requeue") not in ("requeue", "dead"):
        raise SettingsError(f"on_lost is 'requeue' or 'dead', not {options['on_lost']!r}.")
    kept = options.get("retention")
    seconds = kept.total_seconds() if isinstance(kept, timedelta) else kept
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0):
        raise SettingsError(f"retention is a timedelta or a number of seconds, not {kept!r}.")
    return dict(options)

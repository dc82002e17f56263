"""The task class of sidejob tasks, and the decorators that make them.

Importing a decorated module creates no app, reads no configuration and connects to nothing: the task is built from
the decorator's notes when an app finalizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from celery import Celery, _state
from celery.app import base as celery_app
from celery.local import PromiseProxy, Proxy

from ...awaiting import ask
from ...jobs.capacity import CapacityPool
from ...jobs.job import Job, enqueue, find_by_task_id
from ...jobs.running import RetryRun, RunningJob
from ...model.capacity import Admission
from ...model.checks import check_function
from ...model.errors import IllegalMoveError
from ...model.port import PortOptions, parse_ports
from ...model.queue import parse_rate
from ...model.retention import Retention
from ...operations.runtime import Runtime
from ...unit.open_unit import active
from .. import apps, bodies
from ..apps import runtime_for
from ..bodies import OnCommit
from ..messages.doorbell import HEADER
from ..patches import app_methods
from ..task_options import OWN_OPTIONS, check_options, given
from ..tasks.present import handed_over, is_lending
from .eager import apply_eagerly
from .run import adopt_delivery, run_delivery


class SideJobTask(OnCommit):
    """A marker base: the final class is (marker, the app's own Task), so that the project's task class stays a base.

    Subclass it to write a task as a class: ``name``, ``inports``, ``outports``, ``startup``, ``run``, ``shutdown``.
    """

    abstract = True
    sidejob = True
    Request = "celery_sidejob.hooks.jobs.job_request:JobRequest"
    acks_late = False  # the store holds the job from the claim on, whatever the app's default is
    track_started = False

    inports: Any = ()
    outports: Any = ()
    max_losses: int | None = None
    on_lost = "requeue"
    retention: float | timedelta | Mapping[str, Any] | None = None
    run_rate: str | float | None = None
    on_run_rate = "delay"
    lease_renewal = "auto"
    lease: float | None = None
    publish_status = True
    capacity: CapacityPool | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse wrong options of a class-based task, however it is registered."""
        super().on_bound(app)
        options = {name: getattr(cls, name) for name in OWN_OPTIONS if getattr(cls, name, None) is not None}
        check_options({**given(cls, app.Task), **options})
        check_function(cls.run, f"run() of {cls.name}")
        for hook in ("startup", "shutdown"):
            bodies.check_hook(getattr(object.__new__(cls), hook), f"{hook}() of {cls.name}")

    def startup(self, job: RunningJob) -> None:
        """Called before the first run, and committed with it."""

    def shutdown(self, job: RunningJob) -> None:
        """Called when the job is terminated; an error is logged, and the job is terminated all the same."""

    @property
    def parsed_inports(self) -> Mapping[str, PortOptions]:
        """The input ports that every job of this task has."""
        return parse_ports(self.inports, where=f"inports of {self.name}")

    @property
    def parsed_outports(self) -> Mapping[str, PortOptions]:
        """The output ports that every job of this task has."""
        return parse_ports(self.outports, where=f"outports of {self.name}")

    @property
    def job_columns(self) -> Mapping[str, Any]:
        """The columns of its jobs that follow from its options; ``on_lost="dead"`` allows no run to be repeated."""
        retention = Retention() if self.retention is None else Retention.of(self.retention)
        columns: dict[str, Any] = {
            "max_losses": 1 if self.on_lost == "dead" else self.max_losses,
            "retention_s": retention.age_s,
            "retention_keep": retention.keep,
        }
        if self.capacity is not None:
            columns |= Admission.of(self.capacity.spec).columns
        if (rate := parse_rate(self.run_rate)) is not None:
            terminates = self.on_run_rate == "terminate"
            columns |= {"rate_interval_s": rate.interval_s, "rate_burst": rate.burst, "rate_terminates": terminates}
        return columns

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

    async def aenqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Job:
        """Make a job as `enqueue` does, while the event loop goes on; `transaction=` may be asynchronous."""
        return await ask(self.enqueue, args, kwargs, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and return a Celery result of its first asking, with the job as ``.job``."""
        if is_lending():
            with handed_over(options):
                return self.apply_async(args, kwargs, **options)
        if self._get_app().conf.task_always_eager and active() is None:  # in a run the call belongs to the unit
            return self.apply(args, kwargs, **options)
        options = {**self._get_exec_options(), **options}
        options.pop("task_type", None)
        task_id = options.get("task_id")
        job = None if task_id is None else find_by_task_id(self._runtime, task_id)
        if job is None:  # otherwise an earlier attempt to publish this continuation has made the job
            job = enqueue(self._runtime, self, args or (), kwargs, **options)
        given = None if options.get("unique") else task_id  # an open job with this key has another task id
        result = self.AsyncResult(given or job._first_task_id or job.task_id)
        result.job = job
        return result

    def apply(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Make a job of this task and run it here, with its children and wakes, until all is quiet."""
        return apply_eagerly(self, self._runtime, args or (), kwargs, options)

    # -- running -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In a worker, run the job that the delivery names; in a direct call, run the body with the given job."""
        if args and isinstance(args[0], Job):
            return self.run_body(args[0], args[1:], kwargs)
        request = self.request
        if request.called_directly:
            raise TypeError(
                f"{self.name}(...) runs the body, and the body's first argument is a job: call it with one, or make a "
                f"job with {self.name.rpartition('.')[2]}.delay(...)."
            )
        if request.get(HEADER):
            return run_delivery(self, self._runtime, request)
        return adopt_delivery(self, self._runtime, request, args, kwargs)

    def run_body(self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the body through the project's own ``__call__``, if its task class has one."""
        call = bodies.call_of(self, SideJobTask)
        value = self.run(job, *args, **kwargs) if call is None else call(self, job, *args, **kwargs)
        return bodies.result_of(value, f"The body of {self.name}, or one of its hooks,")

    def run_hook(self, which: str, job: RunningJob) -> None:
        """Run the startup or the shutdown like the body: through the project's own ``__call__``.

        ``__call__`` calls `run` of its task, so it gets a copy of this task whose `run` is the hook, with the body's
        own arguments: it may need them to prepare the run. The task itself may be running in other threads.
        """
        hook = getattr(self, "_hooks", {}).get(which) or getattr(self, which)  # decorated functions come first
        if hook == getattr(SideJobTask, which).__get__(self):
            return  # this task has no such hook
        stand_in = object.__new__(type(self))
        stand_in.__dict__.update(self.__dict__, run=lambda job, *args, **kwargs: hook(job))
        stand_in.run_body(job, job.args, job.kwargs)

    def retry(  # noqa: PLR0913 - Celery's own signature
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """Discard this run and try it again later; Celery's `retry`, as a backoff of the job's message in the store."""
        if args is not None or kwargs is not None:
            raise IllegalMoveError(
                f"{self.name}.retry() cannot change a job's arguments; keep what changes in its state."
            )
        if eta is not None:
            aware = self._runtime.tasks.localize(eta)
            countdown = max(0.0, (aware - datetime.now(UTC)).total_seconds())
        again = RetryRun(exc, countdown, max_retries)
        if throw:
            raise again
        return again

    @property
    def _runtime(self) -> Runtime:
        app: Any = self._get_app()
        runtime: Runtime = (
            app.sidejob.runtime if hasattr(app, "sidejob") else runtime_for(app, f"{self.name} is a sidejob task")
        )
        return runtime


P = ParamSpec("P")
R = TypeVar("R")

Build = Callable[[Celery], Any]
"""Builds a task for an app, and registers it there."""

SENDING_OPTIONS = frozenset({"queue", "exchange", "exchange_type", "routing_key", "delivery_mode", "priority"})
"""Options that are set after Celery has bound the task: before, it would warn that Celery 6 wants routes instead."""


class SharedSideJobTask(Proxy, Generic[P, R]):
    """The result of `@sidejob_task`: a proxy for the task of the current app, which also notes the job's hooks."""

    def on_startup(self, function: Callable[[RunningJob], None]) -> Callable[[RunningJob], None]:
        """Call `function` before the first run, in the run's commit."""
        bodies.check_hook(function, f"{function!r}, given to on_startup,")
        object.__getattribute__(self, "_noted")["startup"] = function
        return function

    def on_shutdown(self, function: Callable[[RunningJob], None]) -> Callable[[RunningJob], None]:
        """Call `function` when the job is terminated."""
        bodies.check_hook(function, f"{function!r}, given to on_shutdown,")
        object.__getattribute__(self, "_noted")["shutdown"] = function
        return function

    if TYPE_CHECKING:
        name: str

        def __call__(self, job: Job, *args: P.args, **kwargs: P.kwargs) -> R: ...
        def delay(self, *args: P.args, **kwargs: P.kwargs) -> JobResult[R]: ...
        def enqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Job: ...
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> JobResult[R]: ...
        async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> JobResult[R]: ...
        async def aenqueue(self, args: Any = (), kwargs: Mapping[str, Any] | None = None, **options: Any) -> Job: ...
        async def aapply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> JobResult[R]: ...
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
def sidejob_task(**options: Any) -> Callable[[Callable[Concatenate[RunningJob, P], R]], SharedSideJobTask[P, R]]: ...
def sidejob_task(function: Any = None, /, **options: Any) -> Any:
    """Make a function (or a `SideJobTask` class) the body of durable jobs, for any present or future app.

    All options of a Celery task are allowed. Further options are `inports`, `outports`, `max_losses`, `on_lost`,
    `retention`, `run_rate` with `on_run_rate`, and `lease_renewal` with `lease`. The function's first parameter is the
    running job; with ``bind=True`` the second.
    """
    return _decorated(apps.present, _register_in_all, options, function)


def task_of(app: Celery, function: Any, options: dict[str, Any]) -> Any:
    """Make a sidejob task of one app, as `@sidejob.task` does."""
    if celery_app.USING_EXECV:  # a spawned pool process works for a copy of the app, as Celery's own tasks do there
        return sidejob_task(function, **options)
    return _decorated(lambda: app, partial(_register_in, app), options, function)


def _decorated(
    app_of: Callable[[], Celery], register: Callable[[Build], None], options: dict[str, Any], body: Any
) -> Any:
    """Make a task of the body, or a decorator that does; the task belongs to the app that `app_of` returns."""
    if body is None:
        return partial(_decorated, app_of, register, options)
    if isinstance(body, Proxy):
        raise TypeError("@sidejob_task was applied to what is a task already; remove one of the decorators.")
    if not isinstance(body, type):  # a class is checked once it is a task
        check_function(body, f"The body of a sidejob task, {getattr(body, '__name__', body)},")
    checked = check_options(options)
    name = checked.pop("name", None) or (getattr(body, "name", None) if isinstance(body, type) else None)
    noted: dict[str, Any] = {}
    register(lambda app: build(app, body, name, checked, noted))

    def find() -> Any:
        app = app_of()
        return app.tasks[name or app.gen_task_name(body.__name__, body.__module__)]

    proxy: Any = SharedSideJobTask(find, __doc__=body.__doc__)
    object.__setattr__(proxy, "_noted", noted)
    return proxy


def _register_in(app: Celery, build: Build) -> None:
    with app._finalize_mutex:
        if app.finalized:
            build(app)
        else:  # with the app's other tasks: before any receiver of on_after_finalize, which may look for it
            app._pending.append(PromiseProxy(build, (app,)))


def _register_in_all(build: Build) -> None:
    _state.connect_on_app_finalize(build)
    for app in apps.every_app():
        if app.finalized:
            with app._finalize_mutex:
                build(app)


def build(app: Celery, body: Any, name: str | None, options: dict[str, Any], noted: dict[str, Any]) -> Any:
    """Build and register the task for one app; `noted` has the hooks, including those that are given later."""
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
        task = app_methods.make_task(app, body, name=name, base=marked, **options)
    for option, value in sent.items():
        setattr(type(task), option, value)
    task._hooks = noted
    return task

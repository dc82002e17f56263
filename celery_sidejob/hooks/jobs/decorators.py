"""The decorators that make sidejob tasks.

Importing a decorated module creates no app, reads no configuration and connects to nothing: the task is built from
these notes when an app finalizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from celery import Celery, _state
from celery.app import base as celery_app
from celery.local import PromiseProxy, Proxy

from ...jobs.job import Job
from ...jobs.running import RunningJob
from ...model.checks import check_function
from .. import apps, bodies
from ..patches import app_methods
from ..task_options import check_options
from .sidejob_task import SideJobTask

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
def sidejob_task(
    **options: Any,
) -> Callable[[Callable[Concatenate[RunningJob, P], R]], SharedSideJobTask[P, R]]: ...
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
        check_function(body, f"The body of a sidejob task, {getattr(body, '__name__', body)},", may_await=True)
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

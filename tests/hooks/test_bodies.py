"""A body that Python does not run when it is called is awaited or refused, in whatever it is hidden."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Task

from celery_sidejob import InvalidValueError, RunningJob, SettingsError, SideJobTask, sidejob_task
from tests.tools.apps import make_app
from tests.tools.in_process import Stage


async def asynchronous(*args: Any) -> int:
    return 7


async def an_asynchronous_job(job: RunningJob, *args: Any) -> int:
    await asyncio.sleep(0)
    job.set(told=True)
    return 7


def generator(*args: Any) -> Iterator[int]:
    yield 7


async def asynchronous_generator(*args: Any) -> AsyncIterator[int]:
    yield 7


class Instance:
    async def __call__(self, *args: Any) -> int:
        return 7


class Owner:
    async def method(self, *args: Any) -> int:
        return 7

    def hook(self, job: RunningJob) -> None:
        pass


def named(function: Any) -> Any:
    """Give it what Celery asks of a function."""
    function.__name__, function.__module__, function.__annotations__ = "body", __name__, {}
    return function


AWAITED = [
    pytest.param(asynchronous, id="async"),
    pytest.param(named(Instance()), id="instance"),
    pytest.param(Owner().method, id="method"),
    pytest.param(named(partial(asynchronous, 1)), id="partial"),
]
BODIES = [
    pytest.param(generator, "a generator", id="generator"),
    pytest.param(asynchronous_generator, "an asynchronous generator", id="asynchronous generator"),
]
PARTIAL = pytest.param(named(partial(generator, 1)), "a generator", id="partial")
"""Celery itself takes none."""


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def run_inside(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return asyncio.run(function(*args))

    return wrapper


@pytest.fixture
def app() -> Iterator[Celery]:
    made = make_app(
        "bodies", sidejob_database_url="postgresql://nobody@127.0.0.1:1/nothing", sidejob_durable_tasks=["kept.*"]
    )
    yield made
    made.close()


# -- jobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "kind"), [*BODIES, PARTIAL])
def test_a_sidejob_task_refuses_it(app: Celery, body: Any, kind: str) -> None:
    for decorate in (sidejob_task(name="body"), app.sidejob.task(name="body")):
        with pytest.raises(SettingsError, match=f"is {kind}: a worker that calls it runs nothing"):
            decorate(body)


def test_it_is_refused_by_its_name(app: Celery) -> None:
    with pytest.raises(SettingsError, match="The body of a sidejob task, generator, is a generator"):
        app.sidejob.task(generator)


@pytest.mark.parametrize("hook", ["on_startup", "on_shutdown"])
def test_so_do_its_hooks(app: Celery, hook: str) -> None:
    @app.sidejob.task(name="hooked")
    def body(job: RunningJob) -> None:
        pass

    with pytest.raises(SettingsError, match=rf"given to {hook}, is a generator"):
        getattr(body, hook)(generator)


@pytest.mark.parametrize(
    ("hook", "why"),
    [
        (lambda: None, r"takes \(\), and is called with the job alone: make it \(job\)"),
        (lambda job, reason: None, r"takes \(job, reason\), and is called"),
        (lambda *, job: None, r"takes \(\*, job\), and is called"),
        (partial(lambda job, reason: None, 1, 2), r"takes \(\), and is called"),
        (7, "is no function"),
        (None, "is no function"),
    ],
)
@pytest.mark.parametrize("given_to", ["on_startup", "on_shutdown"])
def test_a_hook_that_cannot_be_called_with_the_job_alone_is_refused(
    app: Celery, given_to: str, hook: Any, why: str
) -> None:
    task = app.sidejob.task(Owner().hook, name="hooked")
    with pytest.raises(SettingsError, match=f"given to {given_to}, {why}"):
        getattr(task, given_to)(hook)


@pytest.mark.parametrize("hook", ["startup", "shutdown"])
def test_so_is_the_hook_of_a_class(app: Celery, hook: str) -> None:
    def register(name: str, function: Any) -> None:
        app.register_task(type("Job", (SideJobTask,), {"name": name, "run": Owner.hook, hook: function})())

    for name, function, taken in (
        ("one", lambda self: None, ""),
        ("two", staticmethod(lambda job, more: None), "job, more"),
    ):
        with pytest.raises(SettingsError, match=rf"{hook}\(\) of {name} takes \({taken}\), and is called"):
            register(name, function)
    for fits in (lambda self, job: None, staticmethod(lambda job: None), classmethod(lambda cls, job: None)):
        register(type(fits).__name__, fits)


def test_hooks_that_can_be_called_with_the_job_alone(app: Celery) -> None:
    def with_more(job: RunningJob, more: int) -> None:
        pass

    task = app.sidejob.task(Owner().hook, name="hooked")
    for fits in (print, Owner().hook, partial(with_more, more=3), passed_on(with_more), lambda job, more=3: None):
        assert task.on_startup(fits) is fits


@pytest.mark.parametrize("method", ["run", "startup", "shutdown"])
def test_so_does_a_task_that_is_a_class(app: Celery, method: str) -> None:
    def run(self: Any, job: RunningJob) -> None:
        pass

    cls = type("Job", (SideJobTask,), {"name": "of.a.class", "run": run, method: generator})
    with pytest.raises(SettingsError, match=rf"{method}\(\) of of\.a\.class is a generator"):
        app.register_task(cls())


def test_what_is_hidden_fails_the_run(stage: Stage) -> None:
    for body in (passed_on(generator), passed_on(asynchronous_generator)):
        job = stage.job(body, ignore_result=True)
        stage.drain()
        assert job.refresh().status == "failed"
        assert isinstance(stage.raised[job.id], InvalidValueError)
        assert "nothing of that has run" in str(stage.raised[job.id])


def test_a_hook_that_hides_it_fails_the_run(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        pass

    task = stage.task(body, name="hiding", shared=False)
    task.on_startup(passed_on(generator))
    job = task.enqueue()
    stage.drain()
    assert job.refresh().status == "failed"


@pytest.mark.parametrize("body", AWAITED)
def test_a_coroutine_is_awaited_wherever_it_comes_from(stage: Stage, body: Any) -> None:
    for function in (body, passed_on(body)):
        job = stage.job(function)
        stage.drain()
        assert job.refresh().status == "completed"  # otherwise it is refused, as generators are


def test_a_coroutine_suspends_and_retries_as_any_body(stage: Stage) -> None:
    async def resting(job: RunningJob) -> None:
        await asyncio.sleep(0)
        job.set(rested=True)
        job.suspend()

    async def retrying(job: RunningJob) -> int:
        await asyncio.sleep(0)
        if job.request.retries < 2:
            raise job.retry(countdown=0)
        job.set(tries=job.request.retries)
        return 7

    rests, retries = stage.job(resting), stage.job(retrying)
    stage.drain()
    assert (rests.refresh().status, rests.get("rested")) == ("suspended", True)
    assert (retries.refresh().status, retries.get("tries")) == ("completed", 2)


def test_hooks_may_be_coroutines(stage: Stage) -> None:
    task = stage.task(an_asynchronous_job, name="awaited", shared=False)
    task.on_startup(lambda job: an_asynchronous_job(job))
    task.on_shutdown(an_asynchronous_job)
    job = task.enqueue()
    stage.drain()
    assert job.refresh().get("told")

    job.unset("told")
    job.terminate()
    stage.drain()
    assert (job.refresh().status, job.get("told")) == ("terminated", True)


def test_a_task_as_a_class_may_have_coroutines(stage: Stage) -> None:
    async def run(self: Any, job: RunningJob) -> int:
        return await an_asynchronous_job(job)

    cls = type("Job", (SideJobTask,), {"name": "of.a.class", "run": run})
    task = stage.app.register_task(cls())
    job = task.enqueue()
    stage.drain()
    assert (job.refresh().status, job.get("told")) == ("completed", True)


def test_what_runs_it_inside_is_as_any_body(stage: Stage) -> None:
    job = stage.job(run_inside(asynchronous))
    stage.drain()
    assert job.refresh().status == "completed"


# -- durable tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "kind"), BODIES)
@pytest.mark.parametrize("options", [{"name": "any", "durable": True}, {"name": "kept.by.name"}])
@pytest.mark.parametrize("late", [False, True])
def test_a_durable_task_refuses_it(app: Celery, body: Any, kind: str, options: Any, late: bool) -> None:
    """Once it is known which tasks are durable; later at once."""
    decorate = app.task(shared=False, autoretry_for=(KeyError,), **options)
    if late:
        app.finalize()
    else:
        decorate(body)

    with pytest.raises(SettingsError, match=f"which is durable, is {kind}"):
        decorate(body) if late else app.finalize()


def test_any_other_task_is_left_alone(app: Celery) -> None:
    app.task(asynchronous, name="not.ours", shared=False)
    app.task(asynchronous, name="kept.not", durable=False, shared=False)
    app.finalize()


def test_a_project_whose_tasks_run_it_themselves_may_have_it(app: Celery) -> None:
    class Asynchronous(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return asyncio.run(super().__call__(*args, **kwargs))

    task = app.task(asynchronous, name="kept.asynchronous", base=Asynchronous, shared=False)
    app.finalize()
    assert task() == 7

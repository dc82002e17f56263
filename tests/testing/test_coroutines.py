"""Bodies of `async def` in the test's own process: by the testing helper, in eager mode, and by crash points."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob, current_job
from celery_sidejob.testing import crash_after, run_until_quiet
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


@pytest.fixture
def total(stage: Stage) -> Any:
    """A task that adds up its packets, has a child double the sum, and keeps both."""

    @stage.task(name="doubled", shared=False)
    async def doubled(job: RunningJob, number: int) -> int:
        await asyncio.sleep(0)
        assert current_job.id == job.id
        return 2 * number

    @stage.task(name="total", inports=["numbers"], outports=["sums"], shared=False)
    async def total(job: RunningJob) -> int:
        found: int = await job.aio.get("total", 0)
        async for number in job.aio.for_inputs("numbers"):
            found += await job.aio.step("square", square, number)
            await job.aio.set(total=found)
            await job.output("sums").aio.write(found)
        twice: int = await job.aio.call("double", doubled, (found,))
        return twice

    async def square(number: int) -> int:
        await asyncio.sleep(0)
        return number * number

    return total


def judge(job: Job) -> None:
    assert job.refresh().status == "completed"
    assert list(job.output("sums")) == [1, 5]
    assert job.get("total") == 5
    assert job.children["double"].status == "completed"


def test_the_helper_runs_them(stage: Stage, total: Any) -> None:
    job = total.enqueue()
    job.input("numbers").write_many([1, 2])
    assert run_until_quiet(stage.sidejob) == 3
    judge(job)


def test_the_helper_runs_them_in_a_test_that_is_a_coroutine(stage: Stage, total: Any) -> None:
    async def test() -> Job:
        job: Job = await total.aenqueue()
        await job.input("numbers").aio.write_many([1, 2])
        run_until_quiet(stage.sidejob)
        return job

    judge(asyncio.run(test()))


@pytest.mark.parametrize("point", ["step", "step:square", "commit", "end"])
def test_they_go_on_behind_a_crash(stage: Stage, total: Any, point: str) -> None:
    job = total.enqueue()
    job.input("numbers").write_many([1, 2])
    with crash_after(point):
        run_until_quiet(stage.sidejob)
    run_until_quiet(stage.sidejob)
    judge(job)


def delayed(task: Any) -> Any:
    return task.delay()


def delayed_in_a_loop(task: Any) -> Any:
    async def call() -> Any:
        return task.delay()

    return asyncio.run(call())


def awaited(task: Any) -> Any:
    async def call() -> Any:
        asked: Awaitable[Any] = task.adelay()
        return await asked

    return asyncio.run(call())


@pytest.mark.parametrize("call", [delayed, delayed_in_a_loop, awaited])
def test_eager_mode_runs_them(stage: Stage, total: Any, call: Callable[[Any], Any]) -> None:
    @stage.app.task(name="waits", durable=True, shared=False)
    async def waits() -> int:
        """Call a job and wait for it, where the body of a task may await."""
        job = (await total.adelay()).job
        await job.input("numbers").aio.write_many([1, 2])
        return int(job.id)

    stage.app.conf.task_always_eager = True
    judge(stage.sidejob.get(call(waits).get()))

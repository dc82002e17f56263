"""A body is cancelled at any of its awaits, run after run: what it has done is there exactly once in the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from celery_sidejob import NO_DATA, RunningJob
from tests.tools.in_process import EMPTY, Stage

EXAMPLES = int(os.environ.get("SIDEJOB_CANCELLED_EXAMPLES", "25"))
NUMBERS = [1, 2, 3]
LAST = 150
"""More awaits than a run has."""


class Cancelled:
    """Drives a coroutine, and cancels its task at one of its awaits: when what it awaits has begun."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine = coroutine
        self._left = at

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                awaited = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as end:
                return end.value
            if not self._left:
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            self._left -= 1
            value = error = None
            try:
                value = yield awaited
            except BaseException as raised:
                error = raised


async def body(stage: Stage, job: RunningJob) -> None:
    """Read packets in turns, do a step of its own, one with rows of the user's, and write a state outside of steps."""
    async for number in job.aio.for_inputs("numbers"):
        await job.output("seen").aio.write(number)
    sink = await stage.sidejob.aio.get("sink")

    async def fill() -> int:
        await sink.input("got").aio.write("from a step")
        await asyncio.sleep(0)
        return 7

    assert await job.aio.step("fill", fill) == 7
    engine = create_async_engine(stage.database_url.replace("postgresql://", "postgresql+psycopg://", 1))
    try:
        async with AsyncSession(engine) as session:
            async with job.aio.step("rows", transaction=session) as step:
                if step.is_new:
                    await session.execute(text("INSERT INTO public.cancelled VALUES (1)"))
                    await sink.input("got").aio.write("beside rows")
                    await step.keep(8)
            await session.commit()
    finally:
        await asyncio.shield(engine.dispose())
    await job.aio.set(done=True)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 60), max_size=6))
@example([*range(0, 60, 2)])
@example([*range(1, 60, 2)])
def test_a_cancelled_body_does_all_exactly_once(stage: Stage, cancellations: list[int]) -> None:
    stage.sql(EMPTY)
    stage.worker_id = stage.new_worker()
    stage.sql("CREATE TABLE IF NOT EXISTS public.cancelled (number int); TRUNCATE public.cancelled")
    left = [*cancellations, LAST]

    async def cancelled(job: RunningJob) -> None:
        await Cancelled(body(stage, job), left.pop(0))

    sink = stage.job(aliases=["sink"])
    job = stage.job(cancelled)
    job.input("numbers").write_many(NUMBERS)
    while True:
        with suppress(RuntimeError):  # "The body of the task was cancelled"
            stage.run(job)
        if job.refresh().status == "completed":
            break
        assert job.status == "failed"
        assert left, job.info["error"]
        job.run(force=True)
    assert list(job.output("seen")) == NUMBERS
    assert sorted(sink.input("got")) == ["beside rows", "from a step"]
    assert stage.sql("SELECT count(*) FROM public.cancelled") == [(1,)]
    assert job.get("done")


async def in_turns(job: RunningJob) -> None:
    async for number in job.aio.for_inputs("numbers"):
        await job.output("seen").aio.write(number)


async def each(job: RunningJob) -> None:
    async for number in job.input("numbers").aio:
        await job.output("seen").aio.write(number)


async def by_number(job: RunningJob) -> None:
    while (number := await job.input("numbers").aio.read()) is not NO_DATA:
        await job.output("seen").aio.write(number)


async def by_packet(job: RunningJob) -> None:
    while (packet := await job.input("numbers").aio.read_packet()) is not None:
        await job.output("seen").aio.write(packet.value)


async def all_at_once(job: RunningJob) -> None:
    await job.output("seen").aio.write_many(await job.input("numbers").aio.read_many(len(NUMBERS)))


@pytest.mark.parametrize("reads", [in_turns, each, by_number, by_packet, all_at_once])
def test_a_cancelled_read_takes_no_packet(
    stage: Stage, reads: Callable[[RunningJob], Coroutine[Any, Any, None]]
) -> None:
    """The body catches the cancellation, such as a timeout of its own, and completes: its reads are committed."""

    async def body(job: RunningJob) -> None:
        with suppress(asyncio.CancelledError):
            await Cancelled(reads(job), job.get("at"))

    for at in range(15):
        job = stage.job(body, state={"at": at})
        job.input("numbers").write_many(NUMBERS)
        assert stage.run(job) in ("completed", "queued")
        assert [*job.output("seen"), *job.input("numbers")] == NUMBERS, at

"""An app whose jobs, hooks and durable tasks are bodies of `async def`."""

from __future__ import annotations

import asyncio
import os
import time
from functools import lru_cache
from typing import Any

from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from celery_sidejob import RunningJob, SideJob, current_job
from celery_sidejob.model.crash_points import acting
from tests.tools.recorder import Record

app = Celery("awaited", broker=os.environ["BROKER_URL"], backend="sidejobpg://")
app.conf.broker_connection_retry_on_startup = False
app.conf.sidejob_database_url = os.environ["DATABASE_URL"]
sidejob = SideJob(app)


def note(event: str, **data: Any) -> None:
    Record.from_env().note(event, **data)


async def opened(event: str) -> None:
    """Wait until the record has an event."""
    while not Record.from_env().of(event):
        await asyncio.sleep(0.02)


@sidejob.task(name="awaited.add_up", inports=["numbers"], outports=["sums"])
async def add_up(job: RunningJob, most: int = 1_000_000) -> int:
    total: int = await job.aio.get("total", 0)
    async for number in job.aio.for_inputs("numbers"):
        await asyncio.sleep(0.001)
        assert current_job.id == job.id
        assert await asyncio.create_task(_present_id()) == job.id
        total += number
        await job.aio.set(total=total)
        await job.output("sums").aio.write(total)
        if total >= most:
            note("paused", total=total)
            await opened("go")
    return total


async def _present_id() -> int:
    await asyncio.sleep(0)
    return current_job.id


@add_up.on_startup
async def startup(job: RunningJob) -> None:
    await job.aio.set(started=True)


@add_up.on_shutdown
async def shutdown(job: RunningJob) -> None:
    await job.aio.set(stopped=True)


@app.task(
    name="awaited.keep",
    bind=True,
    durable=True,
    on_lost="requeue",
    autoretry_for=(ConnectionError,),
    default_retry_delay=0,
)
async def keep(self: Task, fails: int = 0) -> list[Any]:
    before = self.request.id
    note("kept")
    await asyncio.sleep(0.01)
    if self.request.retries < fails:
        raise ConnectionError
    return [before == keep.request.id, self.request.retries]


@app.task(name="awaited.wait_for_go", durable=True, on_lost="requeue")
async def wait_for_go() -> str:
    note("waiting")
    await opened("go")
    return "gone"


@sidejob.task(name="awaited.order")
async def order(job: RunningJob, number: int) -> list[str]:
    """Fulfil an order in three steps, of which two are awaited, and one writes rows of its own."""
    paid = await job.aio.step("charge", charge, number)
    async with AsyncSession(engine()) as session:
        async with job.aio.step("invoice", transaction=session) as step:
            if step.is_new:
                await session.execute(text("INSERT INTO public.invoices VALUES (:number)"), {"number": number})
                await step.keep(f"invoice {number}")
        await session.commit()
    sent = await job.aio.step("send", charge, -number)
    return [paid, step.value, sent]


@sidejob.task(name="awaited.until_go")
async def until_go(job: RunningJob) -> None:
    note("waiting")
    await opened("go")
    await job.aio.set(gone=True)


@sidejob.task(name="awaited.commit")
async def commit(job: RunningJob) -> None:
    """Commit, which lasts until `go`."""

    def wait(point: str) -> None:
        if point == "checkpoint:before-commit":
            note("committing")
            while not Record.from_env().of("go"):
                time.sleep(0.02)

    with acting(wait):
        await job.aio.set(committed=True)
        await job.aio.checkpoint()


@lru_cache
def engine() -> AsyncEngine:
    """One engine for the process: the pool asyncio has one event loop."""
    url = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://", 1)
    return create_async_engine(url, pool_size=5, max_overflow=0)


async def charge(number: int) -> str:
    await asyncio.sleep(0.001)
    note("charged", number=number)
    return f"charged {number}"


@app.task(name="awaited.plain")
async def plain(number: int) -> int:
    await asyncio.sleep(0.01)
    return number


@app.task(name="awaited.ask_others")
async def ask_others() -> list[int]:
    """Ask a task and a job, and wait for both."""
    results = [await plain.adelay(1), (await sidejob.aio.enqueue(three)).result]
    return [await result.aget(timeout=30) for result in results]


@sidejob.task(name="awaited.three")
async def three(job: RunningJob) -> int:
    return 3


@app.task(name="awaited.block")
async def block() -> None:
    time.sleep(2)


@app.task(name="awaited.soft", soft_time_limit=0.5)
async def soft() -> str:
    """Wait in a group until the soft time limit."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_rest())
    except SoftTimeLimitExceeded:
        note("heard")
        return "heard"
    return "not heard"


@app.task(name="awaited.soft_computing", soft_time_limit=0.5)
async def soft_computing() -> str:
    try:
        while True:
            pass
    except SoftTimeLimitExceeded:
        return "heard"


async def _rest() -> None:
    try:
        await asyncio.sleep(60)
    finally:
        note("cancelled")


@sidejob.task(name="awaited.slow", time_limit=0.5)
async def slow(job: RunningJob) -> None:
    note("slow")
    await asyncio.sleep(60)


@sidejob.task(name="awaited.rest")
async def rest(job: RunningJob) -> None:
    note("resting", run=job.run_no)
    if job.run_no == 1:
        await _rest()

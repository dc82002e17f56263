"""The app of the proof `runs` for the pool asyncio: the same bodies as coroutines, by the awaited verbs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from celery import Celery
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from celery_sidejob import NO_DATA, ChildFailedError, RunningJob, SideJob
from proofs.runs.tasks import CHILDREN, ENTER, QUEUE, URL, Refused, note, refuse, shaky
from tests.tools.brokers import Broker

app = Celery("awaited_runs")
app.conf.update(Broker.from_env().configuration)
app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=4, broker_connection_retry_on_startup=True)
sidejob = SideJob(app)
engine = create_async_engine(URL, poolclass=NullPool)


async def begin(job: RunningJob) -> None:
    """Note that a run's body begins, and take a moment."""
    note("began", job.id, job.run_no)
    await pause()


async def pause() -> None:
    """Take a moment, in which a kill may meet it."""
    await asyncio.sleep(random.SystemRandom().uniform(0, 0.02))


async def own(job: RunningJob, name: str, value: int) -> Any:
    """Write a row in one transaction with the record of its step."""
    async with engine.connect() as connection:
        async with job.aio.step(name, transaction=connection) as step:
            if step.is_new:
                await enter(connection, job, name, value)
                await pause()
                await step.keep(value)
        await connection.commit()
    return step.value


async def enter(connection: AsyncConnection, job: RunningJob, what: str, value: int) -> None:
    """Write a row that must be there once."""
    await connection.execute(ENTER, {"job": job.id, "run": job.run_no, "what": what, "value": value})


@sidejob.task(name="runs.order", inports=["answers"], outports=["done", "inside"])
async def order(job: RunningJob, key: int) -> list[Any]:
    """Have each kind of step once, and a saga."""
    await begin(job)
    await job.output("done").aio.write(key)
    charged = await job.aio.step("charge", charge, job, key)
    row = await own(job, "row", key)
    parcel = await job.aio.call("pack", pack, (key,))
    measured = [measure.s(key * 10 + number) for number in range(CHILDREN)]
    sizes = await job.aio.call_all("measure", measured, limit=2)
    await job.aio.sleep("nap", seconds=0.05)
    answer = await job.aio.receive("answers", timeout=600)
    is_silent = await job.aio.receive("answers", timeout=0.05) is NO_DATA
    tried = await job.aio.step("shaky", shaky, key, retries=10_000, backoff=0.02)
    try:
        await job.aio.step("refused", refuse)
    except Refused:
        await own(job, "undo", key)
    try:
        await job.aio.call("rejected", reject, (key,))
    except ChildFailedError:
        await own(job, "give back", key)
    return [charged, row, parcel, sizes, answer, is_silent, tried]


async def charge(job: RunningJob, key: int) -> int:
    """Have effects in the step's commit."""
    await job.output("inside").aio.write(key)
    await pause()
    await job.aio.set(charged=await job.aio.get("charged", 0) + 1)
    return key


@sidejob.task(name="runs.pack")
async def pack(job: RunningJob, key: int) -> int:
    """Be a child that has steps."""
    await begin(job)
    return int(await own(job, "packed", key))


@sidejob.task(name="runs.measure")
async def measure(job: RunningJob, key: int) -> int:
    """Be a child that ends quietly."""
    await begin(job)
    return key


@sidejob.task(name="runs.reject")
async def reject(job: RunningJob, key: int) -> None:
    """Be a child that fails."""
    await begin(job)
    raise Refused(str(key))


@sidejob.task(name="runs.turns", inports=["packets"], outports=["seen"])
async def turns(job: RunningJob) -> None:
    """Have steps in turns."""
    await begin(job)
    async for key in job.aio.for_inputs("packets"):
        await job.output("seen").aio.write(await own(job, "turn", key))


@sidejob.task(name="runs.units", inports=["packets"], outports=["seen"])
async def units(job: RunningJob) -> None:
    """Commit each packet with a row."""
    await begin(job)
    async for key in job.aio.for_inputs("packets"):
        async with engine.connect() as connection:
            async with job.aio.unit(transaction=connection):
                await enter(connection, job, "unit", key)
                await job.output("seen").aio.write(key)
                await pause()
            await connection.commit()


@sidejob.task(name="runs.quiet")
async def quiet(job: RunningJob, key: int) -> int:
    """Return, and leave nothing to write."""
    await begin(job)
    return key


@app.task(name="acceptance.again_task", bind=True, durable=True, on_lost="requeue", ignore_result=True)
async def again(self: Any, key: int) -> None:
    """Be a durable task that may be repeated."""
    note("began", self.request.id, key)
    await pause()
    note("ended", self.request.id, key)


@app.task(name="acceptance.once_task", bind=True, durable=True, on_lost="dead", ignore_result=True)
async def once(self: Any, key: int) -> None:
    """Be a durable task that must not be repeated."""
    note("began", self.request.id, key)
    await pause()
    note("ended", self.request.id, key)

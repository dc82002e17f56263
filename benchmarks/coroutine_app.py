"""The app of `benchmarks coroutines`: bodies of both kinds. Each adds a byte to a file when it is done."""

from __future__ import annotations

import asyncio
import os
import time

from celery import Celery

from benchmarks.done import done
from benchmarks.done import rest as body
from celery_sidejob import RunningJob, SideJob

app = Celery("coroutines", broker=os.environ["BROKER_URL"])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)
if "DATABASE_URL" in os.environ:
    app.conf.sidejob_database_url = os.environ["DATABASE_URL"]
    sidejob = SideJob(app)

    @app.task(durable=True, on_lost="requeue")
    async def rest_for_sure(seconds: float) -> None:
        await body(seconds)

    @sidejob.task
    async def steps(job: RunningJob, number: int) -> None:
        for _ in range(number):
            await job.aio.step("step", asyncio.sleep, 0)
            done()


@app.task
async def rest(seconds: float) -> None:
    await body(seconds)


@app.task
def sleep(seconds: float) -> None:
    time.sleep(seconds)
    done()


@app.task
async def begin() -> None:
    done()
    await asyncio.sleep(3600)

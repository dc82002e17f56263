"""What the workers of `memory` run: each body counts itself."""

from __future__ import annotations

import asyncio
import os
from functools import cache

import redis
from celery import Celery

from celery_sidejob import RunningJob, SideJob

DONE = "memory:done"

app = Celery("memory", broker=os.environ["BROKER_URL"])
app.conf.update(
    sidejob_database_url=os.environ["DATABASE_URL"], task_ignore_result=True, broker_connection_retry_on_startup=False
)
sidejob = SideJob(app)


@cache
def counts() -> redis.Redis:
    """The process's own connection."""
    return redis.Redis.from_url(os.environ["COUNTS_URL"])


@app.task(name="plain", shared=False)
def plain() -> None:
    """A task of Celery's alone."""
    counts().incr(DONE)


@app.task(name="coroutine", shared=False)
async def coroutine() -> None:
    """A plain task in an event loop."""
    await asyncio.sleep(0)
    counts().incr(DONE)


@app.task(name="durable", durable=True, shared=False)
def durable() -> None:
    """A durable task."""
    counts().incr(DONE)


@sidejob.task(name="job")
def job(job: RunningJob) -> None:
    """A job that sets state and writes a packet, as real ones do."""
    job.set(page=1)
    counts().incr(DONE)

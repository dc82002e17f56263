"""The app of test_canvas: jobs and plain tasks that can stand at every place of a canvas."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.app.task import Task

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

app = Celery("canvas", broker="memory://")
if "BROKER_URL" in os.environ:
    app.conf.update(Broker.from_env().configuration)
app.conf.update(
    worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True, result_chord_join_timeout=10.0,
    result_chord_retry_interval=0.1, task_always_eager=os.environ.get("EAGER") == "1",
)  # fmt: skip
sidejob = SideJob(app)


class Broken(Exception):
    """Raised by bodies."""


def note(event: str, **data: Any) -> None:
    Record.from_env().note(event, **data)


@app.task(name="canvas.plain")
def plain(value: Any, more: int = 1) -> Any:
    return sum(value) + more if isinstance(value, list) else value + more


@app.task(name="canvas.fail")
def fail(*_: Any) -> None:
    raise Broken("plain")


@app.task(name="canvas.noted")
def noted(*args: Any) -> None:
    note("noted", args=[str(one) for one in args])


@app.task(name="canvas.errback", bind=True)
def errback(self: Task, *args: Any) -> None:
    note("errback", args=[str(one) for one in args])


@sidejob.task(name="canvas.job")
def job(job: RunningJob, value: Any, more: int = 10) -> Any:
    return sum(value) + more if isinstance(value, list) else value + more


@sidejob.task(name="canvas.patient", inports=["go"])
def patient(job: RunningJob, value: Any = 0) -> Any:
    """Suspends until a packet comes."""
    note("patient", job=job.id, task_id=job.request.id, of_job=job.task_id)
    if not job.input("go").has_data:
        job.suspend()
    return value + job.input("go").read()


@sidejob.task(name="canvas.broken")
def broken(job: RunningJob, *_: Any) -> None:
    raise Broken("job")


@sidejob.task(name="canvas.silent", ignore_result=True)
def silent(job: RunningJob) -> int:
    return 1


@sidejob.task(
    name="canvas.autoretry", autoretry_for=(Broken,), max_retries=2, retry_backoff=False, default_retry_delay=0
)
def autoretry(job: RunningJob, fails: int) -> int:
    note("try", job=job.id, retries=job.request.retries, task_id=job.request.id)
    job.set(tries=job.request.retries)
    if job.request.retries < fails:
        raise Broken("again")
    return int(job.request.retries)


@sidejob.task(
    name="canvas.backoff",
    autoretry_for=(Broken,),
    max_retries=5,
    retry_backoff=1,
    retry_jitter=False,
    retry_backoff_max=2,
)
def backoff(job: RunningJob) -> str:
    note("try", job=job.id, retries=job.request.retries)
    if job.request.retries < 2:
        raise Broken("again")
    return "done"


@sidejob.task(name="canvas.retried", max_retries=3)
def retried(job: RunningJob, countdown: float = 0.3) -> int:
    note("try", job=job.id, retries=job.request.retries)
    if job.request.retries == 0:
        raise job.retry(countdown=countdown)
    return int(job.request.retries)


@sidejob.task(name="canvas.self_retried", bind=True, max_retries=1)
def self_retried(self: Any, job: RunningJob, times: int) -> int:
    if self.request.retries < times:
        raise self.retry(countdown=0, exc=Broken("bound"))
    return int(self.request.retries)


@sidejob.task(name="canvas.exhausted", max_retries=1)
def exhausted(job: RunningJob) -> None:
    raise job.retry(countdown=0)


@sidejob.task(name="canvas.family")
def family(job: RunningJob, depth: int) -> int:
    """Has a child, waits for its end, and counts."""
    if depth and "child" not in job.children:
        job.enqueue(family, (depth - 1,), child_name="child")
        job.suspend()
    if depth and not job.children["child"].get("count"):
        job.suspend()
    job.set(count=1 + (job.children["child"].get("count") if depth else 0))
    return int(job.get("count"))


@sidejob.task(name="canvas.reader", inports=["in"], outports=["*"])
def reader(job: RunningJob) -> None:
    """Keeps what it reads, and passes it on to whoever listens to its port."""
    for value in job.input("in"):
        job.set(read=[*job.get("read", []), value])
        job.output("seen").write(value)


@sidejob.task(name="canvas.writer")
def writer(job: RunningJob, other: int) -> None:
    """Writes to a job that is no relation of its own."""
    sidejob.get(other).input("in").write(7)


@sidejob.task(name="canvas.asking")
def asking(running: RunningJob) -> int:
    """Asks for another job as for a task, in the midst of a run."""
    return int(job.delay(1).job.id)

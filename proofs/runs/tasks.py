"""The app of the proof `runs`: bodies with every kind of step, jobs without steps, and durable tasks."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from celery import Celery
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from celery_sidejob import NO_DATA, ChildFailedError, RunningJob, SideJob
from tests.tools.brokers import Broker

QUEUE = "acceptance"
CHILDREN = 3
URL = os.environ["SIDEJOB_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
ENTER = text("INSERT INTO ledger (job, run, what, value) VALUES (:job, :run, :what, :value)")

app = Celery("runs")
app.conf.update(Broker.from_env().configuration)
app.conf.update(task_default_queue=QUEUE, worker_prefetch_multiplier=4, broker_connection_retry_on_startup=True)
sidejob = SideJob(app)
engine = create_engine(URL, poolclass=NullPool)
_noted = os.open(os.environ["NOTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


class Refused(Exception):
    """What the failing steps and children raise."""


def note(what: str, key: object, number: int) -> None:
    """Note that a body begins or ends: one write, which outlives a kill of this process."""
    os.write(_noted, f"{what} {key} {number} {time.time():.6f}\n".encode())


def begin(job: RunningJob) -> None:
    """Note that a run's body begins, and take a moment."""
    note("began", job.id, job.run_no)
    pause()


def pause() -> None:
    """Take a moment, in which a kill may meet it."""
    time.sleep(random.SystemRandom().uniform(0, 0.02))


def own(job: RunningJob, name: str, value: int) -> Any:
    """Write a row in one transaction with the record of its step."""
    with engine.connect() as connection, job.step(name, transaction=connection) as step:
        if step.is_new:
            enter(connection, job, name, value)
            pause()
            step.value = value
            connection.commit()
    return step.value


def enter(connection: Connection, job: RunningJob, what: str, value: int) -> None:
    """Write a row that must be there once."""
    connection.execute(ENTER, {"job": job.id, "run": job.run_no, "what": what, "value": value})


# -- with steps -------------------------------------------------------------------------------------------------------


@sidejob.task(name="runs.order", inports=["answers"], outports=["done", "inside"])
def order(job: RunningJob, key: int) -> list[Any]:
    """Have each kind of step once, and a saga."""
    begin(job)
    job.output("done").write(key)
    charged = job.step("charge", charge, job, key)
    row = own(job, "row", key)
    parcel = job.call("pack", pack, (key,))
    sizes = job.call_all("measure", [measure.s(key * 10 + number) for number in range(CHILDREN)], limit=2)
    job.sleep("nap", seconds=0.05)
    answer = job.receive("answers", timeout=600)
    is_silent = job.receive("answers", timeout=0.05) is NO_DATA
    tried = job.step("shaky", shaky, key, retries=10_000, backoff=0.02)
    try:
        job.step("refused", refuse)
    except Refused:
        own(job, "undo", key)
    try:
        job.call("rejected", reject, (key,))
    except ChildFailedError:
        own(job, "give back", key)
    return [charged, row, parcel, sizes, answer, is_silent, tried]


def charge(job: RunningJob, key: int) -> int:
    """Have effects in the step's commit."""
    job.output("inside").write(key)
    pause()
    job.set(charged=job.get("charged", 0) + 1)
    return key


def shaky(key: int) -> int:
    """Fail now and then."""
    if random.SystemRandom().random() < 0.4:
        raise Refused("not yet")
    return key


def refuse() -> None:
    """Fail for good."""
    raise Refused("no")


@sidejob.task(name="runs.pack")
def pack(job: RunningJob, key: int) -> int:
    """Be a child that has steps."""
    begin(job)
    return int(own(job, "packed", key))


@sidejob.task(name="runs.measure")
def measure(job: RunningJob, key: int) -> int:
    """Be a child that ends quietly."""
    begin(job)
    return key


@sidejob.task(name="runs.reject")
def reject(job: RunningJob, key: int) -> None:
    """Be a child that fails."""
    begin(job)
    raise Refused(str(key))


@sidejob.task(name="runs.turns", inports=["packets"], outports=["seen"])
def turns(job: RunningJob) -> None:
    """Have steps in turns."""
    begin(job)
    for key in job.for_inputs("packets"):
        job.output("seen").write(own(job, "turn", key))


# -- without steps ----------------------------------------------------------------------------------------------------


@sidejob.task(name="runs.units", inports=["packets"], outports=["seen"])
def units(job: RunningJob) -> None:
    """Commit each packet with a row."""
    begin(job)
    for key in job.for_inputs("packets"):
        with engine.begin() as connection, job.unit(transaction=connection):
            enter(connection, job, "unit", key)
            job.output("seen").write(key)
            pause()


@sidejob.task(name="runs.quiet")
def quiet(job: RunningJob, key: int) -> int:
    """Return, and leave nothing to write."""
    begin(job)
    return key


@app.task(name="acceptance.again_task", bind=True, durable=True, on_lost="requeue", ignore_result=True)
def again(self: Any, key: int) -> None:
    """Be a durable task that may be repeated."""
    note("began", self.request.id, key)
    pause()
    note("ended", self.request.id, key)


@app.task(name="acceptance.once_task", bind=True, durable=True, on_lost="dead", ignore_result=True)
def once(self: Any, key: int) -> None:
    """Be a durable task that must not be repeated."""
    note("began", self.request.id, key)
    pause()
    note("ended", self.request.id, key)

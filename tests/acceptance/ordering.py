"""The app of test_steps: an order whose steps enter what they do into a ledger."""

from __future__ import annotations

import os

from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_sidejob import NO_DATA, ChildFailedError, RunningJob, SideJob
from tests.tools.brokers import Broker

URL = os.environ["SIDEJOB_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")

app = Celery("ordering")
app.conf.update(Broker.from_env().configuration)
app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
sidejob = SideJob(app)
engine = create_engine(URL, poolclass=NullPool, connect_args={"prepare_threshold": None})

ENTER = text("INSERT INTO ledger (job, run, what, value) VALUES (:job, :run, :what, :value)")


def enter(job: RunningJob, what: str, value: int) -> int:
    """Enter something in a transaction of its own: what a step does elsewhere."""
    with engine.begin() as connection:
        connection.execute(ENTER, {"job": job.id, "run": job.run_no, "what": what, "value": value})
    return value


@sidejob.task(name="ordering.measure")
def measure(job: RunningJob, number: int) -> int:
    return number * 10


@sidejob.task(name="ordering.pack")
def pack(job: RunningJob, order: int) -> dict[str, int]:
    return {"parcel": job.step("wrap", enter, job, "wrap", order)}


@sidejob.task(name="ordering.refuse")
def refuse(job: RunningJob) -> None:
    raise ValueError("refused")


@sidejob.task(name="ordering.fulfil", inports=["answers"], outports=["done"])
def fulfil(job: RunningJob, order: int) -> None:
    """Everything that a body can wait for, and an undo step."""
    job.output("done").write(order)
    payment = job.step("charge", enter, job, "charge", 7, retries=5)
    parcel = job.call("pack", pack, (order,))
    sizes = job.call_all("measure", [measure.s(number) for number in range(3)], limit=2)
    try:
        job.call("refuse", refuse)
    except ChildFailedError:
        job.step("undo", enter, job, "undo", 1)
    job.sleep("cool off", seconds=0.3)
    first = job.receive("answers", timeout=60)
    second = job.receive("answers", timeout=0.3)
    with Session(engine) as session, job.step("invoice", transaction=session) as step:
        if step.is_new:
            session.execute(ENTER, {"job": job.id, "run": job.run_no, "what": "invoice", "value": payment})
            job.set(invoiced=True)
            step.value = {"of": payment}
            session.commit()
    job.set(result=[payment, parcel, sizes, first, second is NO_DATA, step.value])

"""The app of test_unit_transaction: bodies whose units are part of transactions of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import Job, LeaseLostError, RunningJob, SideJob
from tests.acceptance.lenders import LENDERS, Lender
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

URL = os.environ["SIDEJOB_DATABASE_URL"]

app = Celery("units")
app.conf.update(Broker.from_env().configuration)
app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
sidejob = SideJob(app)
left_open: list[Lender] = []

ports: dict[str, Any] = {"inports": ["a"], "outports": ["out"]}


class Refused(Exception):
    """Raised by bodies."""


def note(event: str, job: Job, **data: Any) -> None:
    Record.from_env().note(event, job=job.id, **data)


@contextmanager
def lent(kind: str) -> Iterator[Lender]:
    """A connection that is rolled back at the end of the block unless it was committed."""
    with LENDERS[kind](URL) as lender:
        try:
            yield lender
        finally:
            with suppress(Exception):
                lender.rollback()


def enter(lender: Lender, job: Job, what: str, value: int = 0) -> None:
    lender.sql(f"INSERT INTO ledger (job, what, value) VALUES ({job.id}, '{what}', {value})")


def everything(job: RunningJob, lender: Lender, other: int) -> list[Any]:
    """One of each thing that a unit may do; returns what it read."""
    values = list(job.input("a"))
    enter(lender, job, "sum", sum(values))
    job.output("out").write(sum(values))
    job.set(total=sum(values))
    job.enqueue(child, child_name="child")
    job.add_alias(f"alias{job.id}")
    sidejob.get(other).run()
    return values


@sidejob.task(name="units.child")
def child(job: RunningJob) -> None:
    note("child", job)


@sidejob.task(name="units.together", **ports)
def together(job: RunningJob, kind: str, other: int) -> None:
    if "child" in job.children:
        return  # its end has asked us to run once more
    with lent(kind) as lender:
        with job.unit(transaction=lender.transaction):
            everything(job, lender, other)
        note("left", job, status=str(sidejob.get(other).status), state=job.state, children=list(job.children))
        lender.commit()
        note("committed", job, waiting=len(job.input("a")), state=job.state, children=list(job.children))


@sidejob.task(name="units.again", **ports)
def again(job: RunningJob, kind: str, other: int) -> None:
    if "child" in job.children:
        return  # its end has asked us to run once more
    with lent(kind) as lender:
        with job.unit(transaction=lender.transaction):
            note("read", job, values=everything(job, lender, other))
        lender.rollback()
        note("back", job, waiting=len(job.input("a")), state=job.state, children=list(job.children))
        with job.unit(transaction=lender.transaction):
            note("read", job, values=everything(job, lender, other))
        lender.commit()


@sidejob.task(name="units.given_up", **ports)
def given_up(job: RunningJob, kind: str) -> None:
    """Is rolled back and goes on without a transaction: what was before the block counts, what was in it does not."""
    job.set(before=True)
    with lent(kind) as lender:
        with job.unit(transaction=lender.transaction):
            note("read", job, values=list(job.input("a")))
            job.set(inside=True)
        lender.rollback()
    job.set(first=job.input("a").read())


@sidejob.task(name="units.forgotten", **ports)
def forgotten(job: RunningJob, kind: str, goes_on: bool) -> None:
    opened = LENDERS[kind](URL)
    lender = opened.__enter__()
    left_open.append(lender)
    left_open.append(opened)  # type: ignore[arg-type]
    with job.unit(transaction=lender.transaction):
        enter(lender, job, "forgotten")
        job.set(values=list(job.input("a")))
    if goes_on:
        job.set(more=True)


@sidejob.task(name="units.raising", **ports)
def raising(job: RunningJob, kind: str, caught: bool) -> None:
    with lent(kind) as lender:
        job.set(before=True)
        try:
            with job.unit(transaction=lender.transaction):
                enter(lender, job, "refused")
                job.set(inside=list(job.input("a")))
                raise Refused("inside the block")
        except Refused:
            if not caught:
                raise
        lender.rollback()
        job.set(after=list(job.input("a")))


@sidejob.task(name="units.refused", **ports)
def refused(job: RunningJob, kind: str) -> None:
    """The store refuses the unit as the block ends: the caller's transaction is as it was, and so is the run."""
    with lent(kind) as lender:
        rival = sidejob.get(job.id)
        try:
            with job.unit(transaction=lender.transaction):
                values = list(job.input("a"))
                job.enqueue(child, child_name="taken")
                with psycopg.connect(URL, autocommit=True) as outside:
                    outside.execute(
                        "INSERT INTO sidejob.jobs (task, queue, parent_id, name)"
                        " VALUES ('units.child', 'x', %s, 'taken')",
                        [rival.id],
                    )
        except Exception as error:
            note("refused", job, error=type(error).__name__, values=values)
        enter(lender, job, "kept")
        lender.commit()
        job.set(after=list(job.input("a")))


@sidejob.task(name="units.several", **ports)
def several(job: RunningJob, kind: str) -> None:
    with lent(kind) as lender:
        for number in range(4):
            with job.unit(transaction=lender.transaction):
                value = job.input("a").read()
                enter(lender, job, "one", value)
                job.output("out").write(value)
                job.set(number=number)
            lender.commit() if number != 2 else lender.rollback()
            lender.sql("SELECT 1")  # a transaction of the caller's own that has nothing to do with the unit
            lender.commit()
        job.output("out").write("plain")
        job.checkpoint()
        job.output("out").write("last")


@sidejob.task(name="units.used_again", **ports)
def used_again(job: RunningJob, kind: str) -> None:
    """Its connection is in its next transaction already when the run goes on."""
    with lent(kind) as lender:
        with job.unit(transaction=lender.transaction):
            job.set(values=list(job.input("a")))
        lender.commit()
        enter(lender, job, "next")
        job.set(more=True)
        job.checkpoint()
        lender.rollback()


@sidejob.task(name="units.checkpointing", **ports)
def checkpointing(job: RunningJob, kind: str) -> None:
    with lent(kind) as lender:
        for value in job.input("a"):
            enter(lender, job, "one", value)
            job.output("out").write(value)
            job.checkpoint(transaction=lender.transaction)
            lender.commit()
        job.set(total=1)
        job.checkpoint(transaction=lender.transaction)
        lender.rollback()
        note("kept", job, state=job.state)


@sidejob.task(name="units.savepoint", **ports)
def savepoint(job: RunningJob, kind: str) -> None:
    with lent(kind) as lender:
        enter(lender, job, "outer")
        with suppress(Refused), lender.savepoint():
            with job.unit(transaction=lender.transaction):
                enter(lender, job, "inner")
                job.set(values=list(job.input("a")))
            raise Refused
        lender.commit()
        job.set(after=list(job.input("a")))


@sidejob.task(name="units.ending", max_retries=3, **ports)
def ending(job: RunningJob, kind: str, how: str) -> Any:
    """Ends in each way just after the caller's commit."""
    if job.get("done"):
        return "again"
    with lent(kind) as lender:
        with job.unit(transaction=lender.transaction):
            enter(lender, job, how)
            job.set(done=list(job.input("a")))
        lender.commit()
    if how == "suspend":
        job.suspend()
    elif how == "retry":
        raise job.retry(countdown=0)
    elif how == "raise":
        raise Refused
    return how


@sidejob.task(name="units.committing", **ports)
def committing(job: RunningJob) -> None:
    with psycopg.connect(URL, autocommit=True) as connection:
        with job.unit(transaction=connection):
            job.set(values=list(job.input("a")))


@sidejob.task(name="units.nested", **ports)
def nested(job: RunningJob, kind: str) -> None:
    with lent(kind) as lender:
        with job.unit(transaction=lender.transaction):
            job.set(outer=True)
            with job.unit(transaction=lender.transaction):
                job.set(inner=True)


@sidejob.task(name="units.outdated", **ports)
def outdated(job: RunningJob, kind: str) -> None:
    """Is taken for dead during its block; the next run does nothing."""
    if job.run_no > 1:
        return
    with lent(kind) as lender:
        try:
            with job.unit(transaction=lender.transaction):
                enter(lender, job, "zombie")
                job.set(zombie=list(job.input("a")))
                with psycopg.connect(URL, autocommit=True) as outside:
                    outside.execute(
                        "UPDATE sidejob.jobs SET unit_no = NULL, worker_id = NULL, run_kind = NULL, status = 'queued',"
                        " wakes = wakes + 1 WHERE id = %s", [job.id],
                    )  # fmt: skip
        except LeaseLostError:
            lender.rollback()
            enter(lender, job, "told")
            lender.commit()
            with psycopg.connect(URL, autocommit=True) as outside:
                outside.execute(
                    "UPDATE sidejob.messages SET locked_by = NULL, locked_at = NULL, locked_pid = NULL,"
                    " for_run = for_run + 1, published_at = NULL, next_check_at = now() WHERE job_id = %s", [job.id],
                )  # fmt: skip
            raise


@sidejob.task(name="units.shut", **ports)
def shut(job: RunningJob, kind: str) -> None:
    job.suspend()


@shut.on_shutdown
def _(job: RunningJob) -> None:
    with lent(job.args[0]) as lender:
        with job.unit(transaction=lender.transaction):
            enter(lender, job, "shut", job.input("a").read())
        lender.commit()
    job.set(shut=True)


@sidejob.task(name="units.killed", **ports)
def killed(job: RunningJob, kind: str, when: str) -> None:
    """Its process dies once, just before or just after the caller's commit."""
    with lent(kind) as lender:
        for _ in range(3):
            with job.unit(transaction=lender.transaction):
                value = job.input("a").read()
                if isinstance(value, int):
                    enter(lender, job, when, value)
                    job.output("out").write(value)
            if when == "before" and job.run_no == 1 and value == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            lender.commit()
            if when == "after" and job.run_no == 1 and value == 2:
                os.kill(os.getpid(), signal.SIGKILL)

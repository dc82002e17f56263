"""The app of the acceptance tests. Every effect that is to happen exactly once is a row of `ledger`.

A row is written in the transaction of the unit it belongs to (`job.unit(transaction=…)`), so it is there once for each
unit that counts, whatever dies. What merely happened, any number of times, is noted in the test's record.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from celery import Celery
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

from celery_sidejob import JobFailed, RunningJob, SideJob, Status, StoreUnavailableError
from tests.tools.brokers import Broker
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until

_ENTRY = "INSERT INTO ledger (job, run, what, value) VALUES (:job, :run, :what, :value)"
HOLDING_S = 60.0
"""How long a body that is to be killed stays, if it is not; one that nobody lets go on fails then."""

app = Celery("acceptance")
app.conf.update(Broker.from_env().configuration)
app.conf.update(
    task_default_queue="acceptance",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    worker_soft_shutdown_timeout=float(os.environ.get("SOFT_SHUTDOWN", "0")),
)
if "SCHEDULES" in os.environ:
    app.conf.sidejob_schedules = json.loads(os.environ["SCHEDULES"])
sidejob = SideJob(app)


def awaited(decorate: Any) -> Any:
    """Return a decorator of tasks that makes a body a coroutine, which waits for a thread."""

    def decorator(**options: Any) -> Any:
        def made(body: Any) -> Any:
            @wraps(body)
            async def run(*args: Any, **kwargs: Any) -> Any:
                return await asyncio.to_thread(body, *args, **kwargs)

            return decorate(**options)(run)

        return made

    return decorator


if "AWAITED" in os.environ:
    app.task, sidejob.task = awaited(app.task), awaited(sidejob.task)

engine = create_engine(
    os.environ["SIDEJOB_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://"),
    poolclass=NullPool,
    connect_args={"prepare_threshold": None},  # there may be a PgBouncer before it
)


def note(event: str, job: RunningJob, **data: Any) -> None:
    """Note what a body does."""
    Record.from_env().note(event, job=job.id, run=job.run_no, **data)


@contextmanager
def committed(job: RunningJob) -> Iterator[Connection]:
    """Commit the job's unit and the block's SQL together; a store that goes away meanwhile is no failure of the job."""
    try:
        with engine.begin() as connection:
            with job.unit(transaction=connection):
                yield connection
    except (OperationalError, InterfaceError) as error:
        raise StoreUnavailableError(f"The ledger went away: {error}") from error


def enter(connection: Connection, job: RunningJob, what: str, value: int) -> None:
    """Write a row that must be there exactly once."""
    connection.execute(text(_ENTRY), {"job": job.id, "run": job.run_no, "what": what, "value": value})


def enter_once(job: RunningJob, what: str, value: int) -> None:
    """Write a row that must be there once for the job, however often its run begins again: its unit remembers it."""
    if not job.get(f"entered_{what}"):
        with committed(job) as connection:
            enter(connection, job, what, value)
            job.set({f"entered_{what}": True})


# -- the workload of the walk through the crash points ----------------------------------------------------------------


@sidejob.task(name="acceptance.adder", inports=["a", "b"], outports=["sum"])
def adder(job: RunningJob) -> None:
    """Add up pairs; each sum goes into the ledger and to the parent in one commit."""
    note("adder", job)
    for a, b in job.for_inputs("a", "b"):
        with committed(job) as connection:
            enter(connection, job, "sum", a + b)
            job.output("sum").write(a + b)


@adder.on_startup
def _start_adder(job: RunningJob) -> None:
    job.set(starts=job.get("starts", 0) + 1)


@adder.on_shutdown
def _shut_adder_down(job: RunningJob) -> None:
    enter_once(job, "shutdown", 0)


@sidejob.task(name="acceptance.connector", inports=["in"], outports=["x", "y"])
def connector(job: RunningJob) -> None:
    """Move what comes in to two outputs."""
    note("connector", job)
    job.input("in").connect_to(job.output("x"), job.output("y"))


@sidejob.task(name="acceptance.collector")
def collector(job: RunningJob, source: int | None = None) -> None:
    """Read an output port, by default that of its child, beside other readers: two packets in each unit."""
    owner = job.child("source") if source is None else sidejob.get(source)
    left = owner is not None
    while left and owner is not None:
        with committed(job) as connection:
            found = owner.output("x").read_many(2)
            for value in found:
                enter(connection, job, "collected", value)
        note("collected", job, values=found)
        left = bool(found)


@sidejob.task(name="acceptance.family")
def family(job: RunningJob, children: int, pairs: int, first: int = 0) -> int:
    """Give children numbers from `first` on to add, collect their sums, have them terminated, return the total."""
    note("family", job)
    if not job.get("made"):
        for number in range(children):
            child = job.enqueue(adder, child_name=f"adder{number}")
            child.input("a").write_many([first + number * 1000 + pair for pair in range(pairs)])
            child.input("b").write_many([0] * pairs)
        job.set(made=True, total=0, got=0)
        job.checkpoint()
    for child in job.children.values():
        for value in child.output("sum"):
            job.set(total=job.get("total") + value, got=job.get("got") + 1)
            with committed(job) as connection:
                enter(connection, job, "collected", value)
    if job.get("got") < children * pairs:
        job.suspend()
    for child in job.children.values():
        child.terminate()
    total: int = job.get("total")
    return total


@sidejob.task(name="acceptance.brood")
def brood(job: RunningJob, children: int) -> None:
    """Have children that do nothing, and wait until all have ended."""
    note("brood", job)
    if not job.get("made"):
        for number in range(children):
            job.enqueue(leaf, child_name=f"leaf{number}")
        job.set(made=True)
        job.suspend()
    if any(child.status != Status.COMPLETED for child in job.children.values()):
        job.suspend()


@sidejob.task(name="acceptance.leaf")
def leaf(job: RunningJob) -> None:
    """End at once."""


@sidejob.task(name="acceptance.paced", run_rate="5/s")
def paced(job: RunningJob, runs: int) -> None:
    """Run so many times, as fast as the rate allows; note when each run has begun."""
    assert job.ran_at is not None
    number = job.get("runs", 0) + 1
    note("paced", job, number=number, at=job.ran_at.timestamp())
    job.set(runs=number)
    if number < runs:
        job.run()


@sidejob.task(name="acceptance.hasty", run_rate="5/h", on_run_rate="terminate")
def hasty(job: RunningJob) -> None:
    """Run again and again, until the rate ends it."""
    note("hasty", job)
    job.run()


@hasty.on_shutdown
def _(job: RunningJob) -> None:
    note("hasty ended", job)


@sidejob.task(name="acceptance.linked")
def linked(job: RunningJob, total: int) -> None:
    """What follows a family, as its callback."""
    note("linked", job)
    enter_once(job, "linked", total)


@sidejob.task(name="acceptance.stepper", outports=["steps"])
def stepper(job: RunningJob, steps: int) -> None:
    """Write numbers, a checkpoint after each, and go on where the last run came to."""
    note("stepper", job)
    for step in range(job.get("step", 0), steps):
        job.output("steps").write(step)
        job.set(step=step + 1)
        job.checkpoint()


@sidejob.task(name="acceptance.patient", max_retries=None)
def patient(job: RunningJob, value: int = 1) -> None:
    """Be retried once, then set a timer and suspend, then complete."""
    note("patient", job)
    if job.request.retries == 0 and not job.get("asked"):
        raise job.retry(countdown=0.2)
    if not job.get("asked"):
        job.set(asked=True)
        job.run(countdown=0.2)
        job.suspend()
    enter_once(job, "patient", value)


# -- bodies that are killed, frozen or in the way ---------------------------------------------------------------------


@sidejob.task(name="acceptance.holder", inports=["in"])
def holder(job: RunningJob, turns_before: int = 0) -> None:
    """Read a packet, note it and hold on, until another packet says "go" or the record does.

    With `turns_before` so many packets are read and committed first in each run.
    """
    for _ in range(turns_before):
        job.input("in").read()
        job.checkpoint()
    value = job.input("in").read()
    note("holding", job, value=value)
    _hold(job)
    with committed(job) as connection:
        enter(connection, job, "held", value)
    note("held", job)


def _hold(job: RunningJob) -> None:
    record = Record.from_env()
    wait_until(lambda: record.of("go", job=job.id), timeout=HOLDING_S, message="the test to say that it may go on")


@sidejob.task(name="acceptance.waiter", ignore_result=True)
def waiter(job: RunningJob, value: int = 0) -> None:
    """Note the run and hold on; nothing is left to be written at its end."""
    note("holding", job, value=value, pid=os.getpid())
    _hold(job)
    note("went", job)


@sidejob.task(name="acceptance.once")
def once(job: RunningJob, value: int = 0) -> None:
    """Write a row that must be there exactly once."""
    enter_once(job, "once", value)


@sidejob.task(name="acceptance.zombie")
def zombie(job: RunningJob) -> None:
    """Open a transaction, hold on, and commit the user's row, packet and unit in it; the body survives a refusal."""
    note("holding", job)
    _hold(job)
    try:
        with committed(job) as connection:
            enter(connection, job, "effect", 1)
    except Exception as error:
        note("refused", job, error=type(error).__name__)
        raise
    note("done", job)


@sidejob.task(name="acceptance.stubborn")
def stubborn(job: RunningJob, seconds: float) -> None:
    """Sleep in C without letting go of the interpreter, so that no other thread of this process runs."""
    note("stubborn", job)
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    with committed(job) as connection:
        enter(connection, job, "stubborn", 1)


@sidejob.task(name="acceptance.leaver")
def leaver(job: RunningJob, code: int, times: int) -> None:
    """Leave the process with an exit code, the first so many runs."""
    note("leaver", job)
    if job.run_no <= times:
        sys.exit(code)


def end_process(how: str) -> None:
    """End this process in the middle of a run, or wait for somebody else to do it."""
    Record.from_env().note("ending", how=how, pid=os.getpid())
    match how:
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "leave":
            raise SystemExit(4)
        case "memory":
            bytearray(1 << 30)
    time.sleep(60)


@sidejob.task(name="acceptance.ender", max_losses=1)
def ender(job: RunningJob, how: str) -> None:
    """Is lost in one of these ways, once and for good."""
    end_process(how)


@app.task(name="acceptance.ender_task", durable=True)
def ender_task(how: str) -> None:
    """Is lost in the same ways; it must not be repeated."""
    end_process(how)


@sidejob.task(name="acceptance.narrow", inports={"in": {"limit": 1}})
def narrow(job: RunningJob) -> None:
    """Have a port with room for one packet, and read none."""


@sidejob.task(name="acceptance.posts")
def posts(job: RunningJob, reader: int) -> None:
    """Write a packet to the port of another job."""
    note("posts", job)
    with sidejob.port_options(notify=False):
        sidejob.get(reader).input("in").write(job.id)


@sidejob.task(name="acceptance.slow", time_limit=1)
def slow(job: RunningJob) -> None:
    """Take longer than the hard time limit."""
    note("slow", job)
    time.sleep(HOLDING_S)


@sidejob.task(name="acceptance.burner")
def burner(job: RunningJob, seconds: float) -> None:
    """Compute in Python for so long, without ever giving way to a greenlet."""
    note("burning", job)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    with committed(job) as connection:
        enter(connection, job, "burnt", 1)


@sidejob.task(name="acceptance.revocable", inports=["in"])
def revocable(job: RunningJob) -> None:
    """Read a packet, hold on until the run is to stop, and try to commit all the same."""
    note("holding", job, value=job.input("in").read())
    wait_until(lambda: job.stopping, timeout=HOLDING_S, message="the run to be revoked")
    note("stopping", job)
    with committed(job) as connection:
        enter(connection, job, "after all", 1)


@sidejob.task(name="acceptance.overdue", lease=1, lease_renewal="manual")
def overdue(job: RunningJob) -> None:
    """Let the lease of the first run pass, and try to commit once that is noticed; later runs are quick."""
    note("overdue", job)
    if job.run_no == 1:
        wait_until(lambda: job.stopping, timeout=HOLDING_S, message="the lease to be lost")
    with committed(job) as connection:
        enter(connection, job, "in time", job.run_no)


# -- managed queues ----------------------------------------------------------------------------------------------------


@sidejob.task(name="acceptance.timed", ignore_result=True)
def timed(job: RunningJob, number: int, seconds: float = 0.0) -> None:
    """Note when a run begins and ends."""
    note("began", job, number=number)
    time.sleep(seconds)
    note("ended", job, number=number)


@sidejob.task(name="acceptance.short_lived", time_limit=2)
def short_lived(job: RunningJob, number: int, seconds: float = 0.0) -> None:
    """Do the same within a time limit."""
    timed.run(job, number, seconds)


@app.task(name="acceptance.timed_task", durable=True, acks_late=True, reject_on_worker_lost=True)
def timed_task(number: int, seconds: float = 0.0) -> None:
    """Note when a run of a durable task begins and ends."""
    Record.from_env().note("began", number=number)
    time.sleep(seconds)
    Record.from_env().note("ended", number=number)


@app.task(name="acceptance.failing_task", durable=True)
def failing_task() -> None:
    """Fail."""
    raise ValueError("no")


@app.task(name="acceptance.retried_task", bind=True, durable=True, max_retries=3)
def retried_task(self: Any, number: int, countdown: float) -> None:
    """Retry twice, then end."""
    Record.from_env().note("began", number=number, retries=self.request.retries)
    if self.request.retries < 2:
        raise self.retry(countdown=countdown)
    Record.from_env().note("ended", number=number)


@sidejob.task(name="acceptance.retried", max_retries=3)
def retried(job: RunningJob, number: int, countdown: float) -> None:
    """Retry twice, then end."""
    note("began", job, number=number)
    if job.run_no < 3:
        raise job.retry(countdown=countdown)
    note("ended", job, number=number)


# -- what is found and followed ---------------------------------------------------------------------------------------


@sidejob.task(name="acceptance.parcel", max_retries=1)
def parcel(job: RunningJob) -> None:
    """Hold on in the first run, which is killed, be retried in the second, and complete in the third."""
    job.tag("packed").log("packed", run=job.run_no)
    job.checkpoint()
    note("holding", job)
    if job.run_no == 1:
        _hold(job)
    if job.run_no == 2:
        raise job.retry(countdown=0)


@sidejob.task(name="acceptance.picker")
def picker(job: RunningJob, shelf: str) -> None:
    """Fail in the first run, for want of stock."""
    if job.run_no == 1:
        raise JobFailed("no stock", f"Shelf {shelf} is empty.")
    note("picked", job, shelf=shelf)

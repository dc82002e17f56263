"""The app of a soak: the tasks of the acceptance tests, and what its load needs besides.

Every effect that must happen exactly once is a row of `ledger`, written in the transaction of its unit.
"""

from __future__ import annotations

import faulthandler
import signal
import time

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from celery_sidejob import RunningJob
from proofs.soak.load import LEAVES, PLACES, ROOT
from tests.acceptance.jobs import app, committed, engine, enter, enter_once, sidejob

STEP_S = 0.15
_COPY = """
INSERT INTO ledger (job, run, what, value)
SELECT :job, :run, 'note', value FROM notes n
WHERE clerk = :clerk AND NOT EXISTS (SELECT FROM ledger l WHERE l.what = 'note' AND l.value = n.value)"""

faulthandler.register(signal.SIGUSR2, all_threads=True)
app.conf.update(
    broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 5},
    result_backend_transport_options={"socket_timeout": 5, "socket_connect_timeout": 5},
    redis_socket_timeout=5.0,
    redis_socket_connect_timeout=5.0,
)


class Flaw(Exception):
    """Raised by bodies that are to fail."""


@sidejob.task(name="soak.enter")
def one(job: RunningJob, what: str, value: int) -> int:
    """Make one entry."""
    enter_once(job, what, value)
    return value


@sidejob.task(name="soak.steps", autoretry_for=(DBAPIError,), max_retries=None, default_retry_delay=1)
def steps(job: RunningJob, first: int, count: int) -> None:
    """Make entries one by one, slowly; what a user writes whose own database may be away: it is tried again."""
    for step in range(job.get("step", 0), count):
        time.sleep(STEP_S)
        with engine.begin() as connection:
            with job.unit(transaction=connection):
                enter(connection, job, "step", first + step)
                job.set(step=step + 1)


@sidejob.task(
    name="soak.flaky", autoretry_for=(Flaw,), max_retries=None, retry_backoff=1, retry_backoff_max=3, retry_jitter=True
)
def flaky(job: RunningJob, value: int, fails: int) -> None:
    """Fail so many times, with a backoff, then make an entry."""
    if job.request.retries < fails:
        raise Flaw("not yet")
    enter_once(job, "flaky", value)


@sidejob.task(name="soak.reader", inports=["in"])
def reader(job: RunningJob, what: str) -> None:
    """Enter each packet, and rest until the next comes."""
    for value in job.for_inputs("in"):
        with committed(job) as connection:
            enter(connection, job, what, value)
    job.suspend()


@sidejob.task(name="soak.clerk")
def clerk(job: RunningJob, number: int) -> None:
    """Enter what was noted for this clerk before the run began and is not in the ledger: a lost wake loses a note."""
    with committed(job) as connection:
        connection.execute(text(_COPY), {"job": job.id, "run": job.run_no, "clerk": number})
    job.suspend()


@sidejob.task(name="soak.tree")
def tree(job: RunningJob, key: int) -> None:
    """Make children that rest, and rest; the shutdown of each is entered."""
    if not job.get("planted"):
        with committed(job) as connection:
            enter(connection, job, "tree", key)
            for number in range(LEAVES):
                job.enqueue(leaf, (key * PLACES + number,), child_name=f"leaf{number}")
            job.set(planted=True)
    job.suspend()


@tree.on_shutdown
def _fell(job: RunningJob) -> None:
    enter_once(job, "shut", job.args[0] * PLACES + ROOT)


@sidejob.task(name="soak.leaf")
def leaf(job: RunningJob, value: int) -> None:
    """Rest until the termination."""
    job.suspend()


@leaf.on_shutdown
def _fall(job: RunningJob) -> None:
    enter_once(job, "shut", job.args[0])


@sidejob.task(name="soak.failing")
def failing(job: RunningJob, key: int) -> None:
    """Fail for good."""
    raise Flaw(f"as asked by {key}")


@app.task(name="soak.plain")
def plain(value: int) -> int:
    """A plain Celery task, which may be lost."""
    return value

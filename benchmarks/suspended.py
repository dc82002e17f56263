"""What a million suspended jobs cost those who are awake: a wake, other jobs, and a worker's memory.

    python -m benchmarks suspended [--jobs 1000000] [--wakes 1000] [--others 500] [--rounds 6]

Two stores, each with a worker of one process. In the one a suspended parent has so many suspended children, each with
an input port and an open asking. In the other it has as many children as are woken. A client asks a child to run, now
in the one store and now in the other; it is the time until the body begins that counts. Each child's run also wakes
the parent. Then so many other jobs, which have no parent, are made and run, in each store in turn.

It ends with 1 if the 99th percentile of the wakes with a million is above 1.5 times that without, or the worker's
memory grew by more than 10 MB beyond that of the other.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psycopg
import redis
from celery import Celery

from benchmarks.idle import started_processes
from benchmarks.memory import rss
from benchmarks.servers import servers
from celery_sidejob import Job, RunningJob, SideJob
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

BEGUN = "suspended:begun"
"""A list in the broker's Redis: the time at which each woken body began."""
DONE = "suspended:done"
"""How many of the other jobs have run."""
RATIO = 1.5
GROWTH = 10e6

app = Celery("suspended", broker=os.environ.get("BROKER_URL"), set_as_current=False)
app.conf.update(
    sidejob_database_url=os.environ.get("DATABASE_URL"), task_ignore_result=True,
    broker_connection_retry_on_startup=False,
)  # fmt: skip
sidejob = SideJob(app)


@cache
def noted() -> redis.Redis:
    """The Redis in which bodies note things."""
    found: redis.Redis = redis.Redis.from_url(os.environ["BROKER_URL"])
    return found


@sidejob.task(name="waits", inports=["a"])
def waits(job: RunningJob) -> None:
    """Note when it began, and wait on."""
    noted().rpush(BEGUN, repr(time.time()))
    job.suspend()


@sidejob.task(name="parent")
def parent(job: RunningJob) -> None:
    """Wait for children, without a look at them."""
    job.suspend()


@sidejob.task(name="other")
def other(job: RunningJob) -> None:
    """Count."""
    noted().incr(DONE)


FILL = """
INSERT INTO sidejob.jobs (id, task, queue, status, run_no, ended_run, started, ran_at, ended_at, parent_id, name)
  SELECT {first} + n, CASE n WHEN 0 THEN 'parent' ELSE 'waits' END, 'celery', 'suspended', 1, 1, true, now(), now(),
    CASE WHEN n > 0 THEN {first} END, CASE WHEN n > 0 THEN 'c' || n END FROM generate_series(0, {jobs}) n;
INSERT INTO sidejob.ports (job_id, direction, name) SELECT {first} + n, 'in', 'a' FROM generate_series(1, {jobs}) n;
INSERT INTO sidejob.askings (task_id, job_id)
  SELECT gen_random_uuid()::text, {first} + n FROM generate_series(0, {jobs}) n;
SELECT setval('sidejob.jobs_id_seq', {first} + {jobs});
VACUUM ANALYZE;
CHECKPOINT"""
FIRST = 1000


@dataclass
class Side:
    """One of the two stores, with its worker, and what was measured there."""

    name: str
    client: SideJob
    counts: Any
    jobs: int
    worker: Any
    wakes: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def wake(self, number: int) -> None:
        """Wake a child, and note how long its body took to begin."""
        begun = time.time()
        Job(FIRST + number, runtime=self.client.runtime).run()
        found = self.counts.blpop(BEGUN, timeout=60)
        assert found is not None, "a wake did not start a run"
        self.wakes.append(float(found[1]) - begun)

    def run_others(self, count: int) -> None:
        """Make other jobs, and note how many of them ran in a second."""
        self.counts.delete(DONE)
        begun = time.monotonic()
        self.client.enqueue_many([{"task": "other"}] * count)
        wait_until(lambda: int(self.counts.get(DONE) or 0) >= count, timeout=300, message="the other jobs to be run")
        self.others.append(count / (time.monotonic() - begun))

    def look(self) -> None:
        """Note the memory of the worker's processes."""
        self.memory.append(sum(map(rss, [self.worker.pid, *self.worker.children()])))

    def __str__(self) -> str:
        p50, p99 = (1000 * quantile(self.wakes, share) for share in (0.5, 0.99))
        return (
            f"{self.name:24}{p50:10.1f}{p99:10.1f}{statistics.median(self.others):12.0f}"
            f"{self.memory[0] / 1e6:10.1f}{self.memory[-1] / 1e6:10.1f}"
        )


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the others is."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks suspended", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--wakes", type=int, default=1000)
    parser.add_argument("--others", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args(arguments)
    dice = random.Random(1)
    with ExitStack() as stack:
        processes = stack.enter_context(started_processes())
        few = side(stack, processes, "few", given.wakes)
        many = side(stack, processes, "many", given.jobs)
        for one in (few, many):
            for number in range(1, 21):  # connections are opened, and statements prepared
                one.wake(number)
            one.run_others(given.others)
            one.wakes.clear()
            one.others.clear()
            one.look()
        for _ in range(given.wakes):
            for one in (few, many):
                one.wake(dice.randint(1, one.jobs))
        for _ in range(given.rounds):
            for one in (few, many):
                one.run_others(given.others)
        few.look()
        many.look()
    print(f"{'':24}{'p50, ms':>10}{'p99, ms':>10}{'others a s':>12}{'MB before':>10}{'MB after':>10}")
    print(few, many, sep="\n")
    ratio = quantile(many.wakes, 0.99) / quantile(few.wakes, 0.99)
    growth = (many.memory[-1] - many.memory[0]) - (few.memory[-1] - few.memory[0])
    rate = statistics.median(many.others) / statistics.median(few.others)
    print(f"p99 of wakes {ratio:.2f} times, other jobs at {rate:.2f} times the rate; load {os.getloadavg()[0]:.1f}")
    return int(ratio > RATIO or growth > GROWTH)


def side(stack: ExitStack, processes: Processes, name: str, jobs: int) -> Side:
    """A store with so many suspended children of one parent, and a worker."""
    postgres, broker_url = stack.enter_context(servers())
    begun = time.monotonic()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for statement in FILL.split(";"):
            connection.execute(statement.format(first=FIRST, jobs=jobs))  # type: ignore[arg-type]
    print(f"{jobs} suspended jobs made in {time.monotonic() - begun:.0f} s", flush=True)
    env = {"DATABASE_URL": postgres.url, "BROKER_URL": broker_url}
    worker = processes.start_worker("benchmarks.suspended", env=env, name=name, pool="prefork", ready_timeout=120)
    client = Celery(name, broker=broker_url, set_as_current=False)
    client.conf.sidejob_database_url = postgres.url
    made = SideJob(client)
    stack.callback(made.close)
    for task in (waits, parent, other):
        made.task(task.run, name=task.name)
    return Side(f"{jobs} suspended", made, stack.enter_context(redis.Redis.from_url(broker_url)), jobs, worker)

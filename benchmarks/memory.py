"""How much memory a worker takes while it runs tens of thousands of jobs, durable tasks and plain tasks.

    python -m benchmarks memory [--runs 30000] [--kinds job,durable,plain] [--brokers sidejob,redis] [--pool prefork]
    python -m benchmarks memory --kinds coroutine --pool asyncio --concurrency 1000 --page 10000 --runs 1000000

For each kind and broker a fresh worker runs so many, in two processes, a page at a time. After each page the anonymous
memory of the parent and of the children is read (RssAnon: without what is mapped from files). It levels off if its
slope over the second half of the runs is below 50 bytes a run. Plain tasks, which are Celery's alone, show what is
Celery's. Each line is the growth of a process since the first page; the benchmark ends with 1 if a process of a kind
of ours does not level off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

import redis
from celery import Celery

from benchmarks.idle import started_processes
from celery_sidejob import RunningJob, SideJob, embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.waiting import wait_until
from tests.tools.workers import WorkerProcess

SLOPE = 50.0
"""Bytes a run."""
DONE = "memory:done"
"""A key of the broker's Redis: how many bodies have ended."""


@dataclass
class Curve:
    """The memory of one process after each page."""

    name: str
    page: int
    rss: list[int] = field(default_factory=list)

    @property
    def slope(self) -> float:
        """Bytes a run over the second half."""
        later = self.rss[len(self.rss) // 2 :]
        return linear_regression([self.page * place for place in range(len(later))], later).slope

    def __str__(self) -> str:
        shown = " ".join(f"{(rss - self.rss[0]) / 1e6:5.2f}" for rss in self.rss[:: max(1, len(self.rss) // 10)])
        return f"{self.name:32}{self.rss[0] / 1e6:7.1f}{self.rss[-1] / 1e6:7.1f}{self.slope:9.1f}  {shown}"


def main(arguments: list[str]) -> int:
    """Run, measure, print; return 1 if something does not level off."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=30_000)
    parser.add_argument("--kinds", default="job,durable,plain")
    parser.add_argument("--brokers", default="sidejob,redis")
    parser.add_argument("--pool", default="prefork")
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--page", type=int, default=1000)
    given = parser.parse_args(arguments)
    grow = False
    print(f"{'process':32}{'MB':>7}{'at end':>7}{'B a run':>9}  growth in MB", flush=True)
    for broker in given.brokers.split(","):
        for kind in given.kinds.split(","):
            for curve in measure(broker, kind, given.runs, given.page, (given.pool, given.concurrency)):
                print(curve, flush=True)
                grow |= kind not in ("plain", "coroutine") and curve.slope > SLOPE
    return int(grow)


def measure(broker: str, kind: str, runs: int, size: int, pool: tuple[str, int]) -> Iterator[Curve]:
    """Yield the curves of the processes of a fresh worker with this pool and concurrency."""
    with ExitStack() as stack:
        database_url = stack.enter_context(embedded.Postgres()).url
        upgrade(database_url)
        redis_url = stack.enter_context(embedded.Valkey()).url
        counts = stack.enter_context(redis.Redis.from_url(redis_url))
        broker_url = redis_url.replace("redis://", f"{broker}://", 1)
        env = {"DATABASE_URL": database_url, "BROKER_URL": broker_url, "COUNTS_URL": redis_url}
        publish = publisher(stack, database_url, broker_url, kind)
        processes = stack.enter_context(started_processes())
        worker = processes.start_worker(
            "benchmarks.counted", env=env, pool=pool[0], concurrency=pool[1], name="counted"
        )
        curves: dict[int, Curve] = {}
        for page in range(runs // size):
            publish(size)
            wanted = (page + 1) * size
            wait_until(
                lambda wanted=wanted: int(counts.get(DONE) or 0) >= wanted, timeout=300, message="the page to be run"
            )
            time.sleep(0.5)  # what follows the bodies
            for pid, name in members(worker):
                curve = curves.setdefault(pid, Curve(f"{broker} {kind} {name}", size))
                curve.rss.append(rss(pid))
        yield from curves.values()


def members(worker: WorkerProcess) -> Iterator[tuple[int, str]]:
    """The processes of a worker."""
    yield worker.pid, "parent"
    for number, pid in enumerate(sorted(worker.children())):
        yield pid, f"child {number + 1}"


def rss(pid: int) -> int:
    """How many bytes of a process are in memory, and of no file."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def publisher(stack: ExitStack, database_url: str, broker_url: str, kind: str) -> Callable[[int], Any]:
    """What publishes a page."""
    app = Celery("memory", broker=broker_url, set_as_current=False)
    app.conf.update(sidejob_database_url=database_url, task_ignore_result=True, sidejob_durable_tasks=["durable"])
    sidejob = SideJob(app)
    stack.callback(sidejob.close)

    @sidejob.task(name="job")
    def job(job: RunningJob) -> None:
        """Only its name counts."""

    @app.task(name="durable", shared=False)
    def durable() -> None:
        """As above."""

    if kind == "job":
        return lambda count: sidejob.enqueue_many([{"task": "job"}] * count)
    if kind == "durable":
        return lambda count: sidejob.send_many([durable.s() for _ in range(count)])
    return lambda count: [app.send_task(kind) for _ in range(count)]

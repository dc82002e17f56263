"""Bodies of `async def` in the pool asyncio, against Celery's pools prefork and threads.

    python -m benchmarks coroutines [--tasks 5000] [--waiting 10000] [--brokers redis,sidejob,sidejobpg]

The tasks are published before the worker starts; the rate is from the first tenth of them that was done to the last
task. Tasks of 0.1 s run in the pool asyncio with 1,000 at once, in 50 threads, and in two processes (a fifth of the
tasks, because they take long). Tasks that do nothing run in the pool asyncio and in two processes. With sidejobpg there
are durable tasks too, and jobs of twenty steps, of which steps are counted. In the end so many bodies wait at once, and
the worker's memory is read.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from celery import Celery

from benchmarks.idle import started_processes
from benchmarks.servers import started_broker
from celery_sidejob import RunningJob, SideJob, embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.waiting import wait_until

APP = "benchmarks.coroutine_app"
TIMEOUT_S = 300.0
RUNS = [
    ("0.1 s, asyncio, 1,000 at once", "rest", [0.1], "asyncio", 1000, 1),
    ("0.1 s, threads, 50", "sleep", [0.1], "threads", 50, 2),
    ("0.1 s, prefork, 2", "sleep", [0.1], "prefork", 2, 10),
    ("nothing, asyncio, 1,000 at once", "rest", [0], "asyncio", 1000, 1),
    ("nothing, prefork, 2", "sleep", [0], "prefork", 2, 1),
]
"""What is shown, task, arguments, pool, concurrency, and which part of the tasks."""
IN_POSTGRES = [
    ("0.1 s, durable, asyncio, 1,000", "rest_for_sure", [0.1], "asyncio", 1000, 1),
    ("nothing, durable, asyncio, 1,000", "rest_for_sure", [0], "asyncio", 1000, 1),
    ("steps of jobs, asyncio, 1,000", "steps", [20], "asyncio", 1000, 20),
]
"""The same for durable tasks and jobs; a job counts as often as it has steps."""


def main(arguments: list[str]) -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks coroutines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--brokers", default="redis,sidejob,sidejobpg")
    given = parser.parse_args(arguments)
    for broker in given.brokers.split(","):
        for shown, task, args, pool, concurrency, part in [*RUNS, *(IN_POSTGRES if broker == "sidejobpg" else ())]:
            rate = measured(broker, task, args, given.tasks // part, pool, concurrency)
            print(f"{broker:8} {shown:34} {rate:7.0f} a second, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"{given.waiting} bodies wait: {waiting(given.waiting):.0f} MB", flush=True)


def measured(broker: str, task: str, args: list[Any], tasks: int, pool: str, concurrency: int) -> float:
    """Return how many tasks a second a fresh worker runs."""
    with (
        embedded.Postgres(durable=True) as postgres, started_broker(broker, postgres.url) as place,
        started_processes() as processes, TemporaryDirectory() as directory,
    ):  # fmt: skip
        done = Path(directory) / "done"
        env = {"BROKER_URL": place.url, "DONE": str(done)}
        if broker == "sidejobpg":
            upgrade(postgres.url)
            env["DATABASE_URL"] = postgres.url
        publish(place.url, env.get("DATABASE_URL"), task, args, tasks)
        processes.start_worker(APP, env=env, pool=pool, concurrency=concurrency)
        ends = tasks * (args[0] if task == "steps" else 1)
        first, began = counted(done, ends // 10)
        last, ended = counted(done, ends)
        return (last - first) / (ended - began)


def waiting(bodies: int) -> float:
    """Return the megabytes of a worker in which so many bodies wait."""
    with started_broker("sidejob", "") as place, started_processes() as processes, TemporaryDirectory() as directory:
        done = Path(directory) / "done"
        publish(place.url, None, "begin", [], bodies)
        env = {"BROKER_URL": place.url, "DONE": str(done)}
        worker = processes.start_worker(APP, env=env, pool="asyncio", concurrency=bodies)
        counted(done, bodies)
        return psutil.Process(worker.pid).memory_info().rss / 1e6


def publish(broker_url: str, database_url: str | None, task: str, args: list[Any], tasks: int) -> None:
    """Publish tasks, or make jobs, a thousand in a transaction where that is possible."""
    app = Celery(broker=broker_url, set_as_current=False)
    name = f"{APP}.{task}"
    if database_url is not None:
        app.conf.update(sidejob_database_url=database_url, sidejob_durable_tasks=[f"{APP}.rest_for_sure"])
        sidejob = SideJob(app)
        steps = sidejob.task(_steps, name=f"{APP}.steps")
        for begin in range(0, tasks, 1000):
            signatures = [app.signature(name, args) for _ in range(min(1000, tasks - begin))]
            if task == "steps":
                sidejob.enqueue_many({"task": steps, "args": args} for _ in signatures)
            elif task == "rest_for_sure":
                sidejob.send_many(signatures)
            else:
                for signature in signatures:
                    signature.apply_async()
        sidejob.close()
    else:
        with app.producer_or_acquire() as producer:
            for _ in range(tasks):
                app.send_task(name, args, producer=producer)
    app.close()


def _steps(job: RunningJob, number: int) -> None:
    """Stand for the worker's task."""


def counted(done: Path, wanted: int) -> tuple[int, float]:
    """Wait for so many ends, and return their number and the time."""
    wait_until(lambda: done.exists() and done.stat().st_size >= wanted, timeout=TIMEOUT_S, interval=0.01)
    return done.stat().st_size, time.monotonic()

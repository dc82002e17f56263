"""Bodies of `async def` in the pool asyncio, against Celery's pools prefork and threads, and against other libraries.

    python -m benchmarks coroutines [--tasks 5000] [--waiting 10000] [--brokers redis,sidejob,sidejobpg]
        [--rounds 1] [--peers]

The tasks are published before the worker starts; the rate is from the first tenth of them that was done to the last
task. Tasks of 0.1 s run in the pool asyncio with 1,000 at once, in 50 threads, and in two processes (fewer tasks,
because they take long). Tasks that do nothing run in the pool asyncio and in two processes. With sidejobpg there are
durable tasks too, and jobs of twenty steps, of which steps are counted. In the end so many bodies wait at once, and the
worker's memory is read. With more than one round all sides are measured in turns, and medians follow.

With `--peers` the tasks of both kinds run in other libraries too, those that are installed:

    pip install taskiq taskiq-redis celery-aio-pool procrastinate pgqueuer asyncpg
    pip install --no-deps arq hiredis

No worker logs a run then, Celery's neither. Each is one process with coroutines on uvloop, as the pool asyncio has it,
with up to 1,000 at once and no results; settings that are not named are as they come:

- arq: `max_jobs=1000`, and it looks for jobs twice a second. It asks for redis-py below 6, and taskiq-redis for 8 or
  newer. arq 0.28 runs with redis-py 8, therefore `--no-deps`; hiredis, which arq brings, then serves all sides.
- taskiq: `--workers 1 --max-async-tasks 1000` with the stream of taskiq-redis, which reads up to 100 messages at once
  and acknowledges each after its run. Its list has no acknowledgement.
- celery-aio-pool 0.1.0rc8 works with Celery 5.7, but its concurrency is 1 whatever `--concurrency` says: the worker's
  main thread waits for the end of each coroutine. It has the default loop.
- procrastinate: `concurrency=1000`. It fetches jobs one by one.
- pgqueuer: `max_concurrent_tasks=1000`, with its batches of 10, with batches of 100, and with batches of 500, the
  largest that this limit allows.

arq, taskiq and celery-aio-pool have a Redis started like that of `redis`; procrastinate and pgqueuer have a database of
their own in a Postgres started like that of `sidejobpg`. Celery acknowledges plain tasks before they run, on
celery-aio-pool too; the other libraries note the end of each task after its run, as durable tasks do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from celery import Celery

from benchmarks.idle import started_processes
from benchmarks.peers import installed
from benchmarks.servers import started_broker
from benchmarks.turns import Median
from celery_sidejob import RunningJob, SideJob, embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.waiting import wait_until
from tests.tools.workers import Process, environment

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
PEERS = {
    "arq": "--no-deps arq hiredis",
    "taskiq": "taskiq taskiq-redis",
    "celery-aio-pool": "celery-aio-pool",
    "procrastinate": "procrastinate",
    "pgqueuer": "pgqueuer asyncpg",
}
"""The libraries of `--peers`, and what pip is told to install for each."""
DATABASES = ("procrastinate", "pgqueuer")
"""Those that have a database of their own; the others are in a Redis."""
PEER_RUNS = [
    ("arq", "1,000 at once", "1000"),
    ("taskiq", "stream, 1,000 at once", "1000"),
    ("procrastinate", "1,000 at once", "1000"),
    ("pgqueuer", "1,000, batches of 10", "1000", "10"),
    ("pgqueuer", "1,000, batches of 100", "1000", "100"),
    ("pgqueuer", "1,000, batches of 500", "1000", "500"),
]
"""Library, what is shown, and the limits that its worker is given."""


def main(arguments: list[str]) -> None:
    """Run, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks coroutines", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--brokers", default="redis,sidejob,sidejobpg")
    parser.add_argument("--peers", action="store_true", help="also other libraries, those that are installed")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side is measured, in turns")
    given = parser.parse_args(arguments)
    log_level = "WARNING" if given.peers else "INFO"
    sides: dict[str, Callable[[], float]] = {
        f"{broker:13} {shown:34}": partial(
            measured, broker, task, args, given.tasks // part, pool, concurrency, log_level=log_level
        )
        for broker in given.brokers.split(",")
        for shown, task, args, pool, concurrency, part in [*RUNS, *(IN_POSTGRES if broker == "sidejobpg" else ())]
    }
    if given.peers:
        sides |= peers(given.tasks)
    rates: dict[str, list[float]] = {shown: [] for shown in sides}
    for number in range(given.rounds):
        for shown in reversed(sides) if number % 2 else sides:
            rates[shown].append(sides[shown]())
            print(f"{shown} {rates[shown][-1]:7.0f} a second, load {os.getloadavg()[0]:.1f}", flush=True)
    if given.rounds > 1:
        print(f"medians of {given.rounds} rounds, and the intervals in which they lie")
        for shown, figures in rates.items():
            middle = Median.of(figures)
            print(f"{shown} {middle.middle:7.0f} ({middle.lower:.0f} to {middle.upper:.0f})")
    print(f"{given.waiting} bodies wait: {waiting(given.waiting):.0f} MB", flush=True)


def peers(tasks: int) -> dict[str, Callable[[], float]]:
    """Return what measures the libraries that are installed, and print how to install the others."""
    there = {}
    for name, what in PEERS.items():
        try:
            versions = [f"{part} {version(part)}" for part in what.split() if not part.startswith("-")]
        except PackageNotFoundError as missing:
            print(f"{missing.name} is not installed: pip install {what}", flush=True)
        else:
            print(", ".join(versions), flush=True)
            there[name] = what
    sides: dict[str, Callable[[], float]] = {}
    for work, seconds in (("0.1 s", 0.1), ("nothing", 0.0)):
        for name, shown, *limits in PEER_RUNS:
            if name in there:
                sides[f"{name:13} {f'{work}, {shown}':34}"] = partial(measured_peer, name, tasks, seconds, limits)
        if "celery-aio-pool" in there:
            sides[f"{'aio-pool':13} {f'{work}, redis, one at a time':34}"] = partial(
                measured, "redis", "rest", [seconds], tasks // (20 if seconds else 1), "custom", 1, log_level="WARNING"
            )
    return sides


def measured(
    broker: str, task: str, args: list[Any], tasks: int, pool: str, concurrency: int, *, log_level: str
) -> float:
    """Return how many tasks a second a fresh worker runs."""
    with (
        embedded.Postgres(durable=True) as postgres,
        started_broker(broker, postgres.url) as place,
        started_processes() as processes,
        TemporaryDirectory() as directory,
    ):
        done = Path(directory) / "done"
        env = {"BROKER_URL": place.url, "DONE": str(done)}
        if broker == "sidejobpg":
            upgrade(postgres.url)
            env["DATABASE_URL"] = postgres.url
        if pool == "custom":
            env["CELERY_CUSTOM_WORKER_POOL"] = "celery_aio_pool.pool:AsyncIOPool"
        publish(place.url, env.get("DATABASE_URL"), task, args, tasks)
        worker = processes.start_worker(
            APP,
            env=env,
            pool=pool,
            concurrency=concurrency,
            extra=[f"--loglevel={log_level}"],
            ready_timeout=None,  # it is said at the level INFO only
        )
        return rate(worker, done, tasks * (args[0] if task == "steps" else 1))


def measured_peer(name: str, tasks: int, seconds: float, limits: list[str]) -> float:
    """Return how many tasks a second a fresh worker of this library runs."""
    with ExitStack() as stack:
        if name in DATABASES:
            url = installed(name, stack.enter_context(embedded.Postgres(durable=True)).url)
        else:
            url = stack.enter_context(started_broker("redis", "")).url
        processes = stack.enter_context(started_processes())
        done = Path(stack.enter_context(TemporaryDirectory())) / "done"
        program = [sys.executable, "-m", f"benchmarks.{name}_app"]
        subprocess.run(
            [*program, "client", url],
            check=True,
            env=environment({}),
            input=f"rest {tasks} {seconds * 1000:.0f}\n",
            text=True,
            stdout=subprocess.DEVNULL,
        )
        worker = processes.start([*program, "worker", url, *limits], env={"DONE": str(done)}, name=name)
        return rate(worker, done, tasks)


def rate(worker: Process, done: Path, ends: int) -> float:
    """Return how many ends a second there are, from the first tenth of them to the last."""
    worker.wait_for(done.exists, TIMEOUT_S, what="ran a task")
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

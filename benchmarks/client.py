"""A client in a process of its own, with the app of `stamps.py`: does what each line of its input says, and times it.

`publish N` calls the task N times and answers with how many a second that were; `threads N` calls it as often from
four threads, as a web server's do; `together N` publishes N by `send_many`, or without this package's store by
kombu's batch; `wait N` calls the task each 20 ms, N times, and answers with the median of microseconds from the call to
the body's first line; `pass N` calls the first of three tasks, and `write N M` writes packets to the first of three
jobs that commit every M. In the schema for jobs it makes those instead of tasks, by `enqueue` and `enqueue_many`. The
first answer says whether anything of this package was imported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

THREADS = 4
EVERY_S = 0.02
LATEST_S = 30.0


def main() -> None:
    """Serve until the input ends."""
    # As a worker's app is made; but nothing of the task's own is to run here.
    stamps = Path(os.environ.pop("STAMPS"))
    from benchmarks.stamps import JOBS_SCHEMA, app_of_environment

    app = app_of_environment()
    stamp = app.tasks["stamp"]
    are_jobs = os.environ.get("SCHEMA") == JOBS_SCHEMA
    call = app.tasks["job"].enqueue if are_jobs else stamp.delay
    doing: dict[str, Callable[..., float]] = {
        "publish": lambda count: publish(call, count),
        "threads": lambda count: from_threads(call, count),
        "together": lambda count: enqueue_many(app, count) if are_jobs else together(app, stamp, count),
        "wait": lambda count: wait(call, count, stamps),
        "pass": lambda count: publish(app.tasks["first"].delay, count),
        "write": partial(write, app),
    }
    serve(doing)


def serve(doing: dict[str, Callable[..., float]]) -> None:
    """Do what each line of the input says, and answer each with its figure."""
    print("ours" if "celery_sidejob" in sys.modules else "plain", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        print(doing[verb](*map(int, numbers)), flush=True)


def publish(call: Callable[[], Any], count: int) -> float:
    """One call after the other."""
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return count / (time.perf_counter() - begun)


def from_threads(call: Callable[[], Any], count: int) -> float:
    """One call after the other in each of some threads: while one waits, others go on."""
    threads = [Thread(target=publish, args=(call, count // THREADS)) for _ in range(THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count / (time.perf_counter() - begun)


def in_one_go(call: Callable[[], Any], count: int) -> float:
    """One call that sends all."""
    begun = time.perf_counter()
    call()
    return count / (time.perf_counter() - begun)


def together(app: Any, stamp: Any, count: int) -> float:
    """All in one go."""
    begun = time.perf_counter()
    if hasattr(app, "sidejob"):
        app.sidejob.send_many([stamp.s() for _ in range(count)])
    else:
        with app.producer_pool.acquire(block=True) as producer, producer.batch():
            for _ in range(count):
                stamp.apply_async(producer=producer)
    return count / (time.perf_counter() - begun)


def enqueue_many(app: Any, count: int) -> float:
    """All jobs in one go."""
    begun = time.perf_counter()
    app.sidejob.enqueue_many({"task": "job"} for _ in range(count))
    return count / (time.perf_counter() - begun)


def write(app: Any, count: int, commit_every: int) -> float:
    """Make three jobs that hand on packets, and write packets to the first."""
    begun = time.perf_counter()
    after = None
    for _ in range(3):
        after = app.tasks["hand_on"].enqueue((after and after.id, commit_every))
    with app.sidejob.port_options(notify=False):
        after.input("packets").write_many(range(count))
    return count / (time.perf_counter() - begun)


def wait(call: Callable[[], Any], count: int, stamps: Path) -> float:
    """One call each 20 ms, when the one before has run; the file of stamps is empty."""
    called = []
    for number in range(count):
        time.sleep(EVERY_S)
        called.append(time.monotonic_ns())
        call()
        deadline = time.monotonic() + LATEST_S
        while stamps.stat().st_size < 8 * (number + 1):
            assert time.monotonic() < deadline, "a task has not run"
            time.sleep(0.002)
    ran = memoryview(stamps.read_bytes()).cast("q")
    return median(one - other for one, other in zip(ran, called, strict=True)) / 1000


if __name__ == "__main__":
    main()

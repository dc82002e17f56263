"""A client in a process of its own, with the app of `stamps.py`: does what each line of its input says, and times it.

`publish N` calls the task N times and answers with how many a second that were; `threads N` calls it as often from
four threads, as a web server's do; `together N` publishes N by `send_many`, or without this package's store by
kombu's batch; `enqueue N` and `enqueue_many N` make jobs; `wait N` calls the task each 20 ms, N times, and answers
with the median of microseconds from the call to the body's first line. The first answer says whether anything of this
package was imported.
"""

from __future__ import annotations

import os
import sys
import time
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
    from benchmarks.stamps import make_app

    is_late = "LOCKS_LATE" in os.environ
    app = make_app(os.environ["BROKER_URL"], os.environ.get("DATABASE_URL"), locks_late=is_late)
    stamp = app.tasks["stamp"]
    doing = {
        "publish": lambda count: publish(stamp, count),
        "threads": lambda count: from_threads(stamp, count),
        "together": lambda count: together(app, stamp, count),
        "enqueue": lambda count: enqueue(app, count),
        "enqueue_many": lambda count: enqueue_many(app, count),
        "wait": lambda count: wait(stamp, count, stamps),
    }
    print("ours" if "celery_sidejob" in sys.modules else "plain", flush=True)
    for line in sys.stdin:
        verb, count = line.split()
        print(doing[verb](int(count)), flush=True)


def publish(stamp: Any, count: int) -> float:
    """One call after the other."""
    begun = time.perf_counter()
    for _ in range(count):
        stamp.delay()
    return count / (time.perf_counter() - begun)


def from_threads(stamp: Any, count: int) -> float:
    """One call after the other in each of some threads: while one waits, others go on."""
    threads = [Thread(target=publish, args=(stamp, count // THREADS)) for _ in range(THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def enqueue(app: Any, count: int) -> float:
    """One job after the other."""
    begun = time.perf_counter()
    for _ in range(count):
        app.tasks["job"].enqueue()
    return count / (time.perf_counter() - begun)


def enqueue_many(app: Any, count: int) -> float:
    """All jobs in one go."""
    begun = time.perf_counter()
    app.sidejob.enqueue_many({"task": "job"} for _ in range(count))
    return count / (time.perf_counter() - begun)


def wait(stamp: Any, count: int, stamps: Path) -> float:
    """One call each 20 ms, when the one before has run; the file of stamps is empty."""
    called = []
    for number in range(count):
        time.sleep(EVERY_S)
        called.append(time.monotonic_ns())
        stamp.delay()
        deadline = time.monotonic() + LATEST_S
        while stamps.stat().st_size < 8 * (number + 1):
            assert time.monotonic() < deadline, "a task has not run"
            time.sleep(0.002)
    ran = memoryview(stamps.read_bytes()).cast("q")
    return median(one - other for one, other in zip(ran, called, strict=True)) / 1000


if __name__ == "__main__":
    main()

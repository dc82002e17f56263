"""The app of `benchmarks results`, and its client: a process that calls and waits for results, and times that.

The client does what each line of its input says, as `client.py`. `trip N` calls a task and waits for its result, N
times, and answers with the median of microseconds; `late` answers with the 99th percentile of all trips so far.
`publish N` calls the task N times. `chord N` has a chord of N parts done, and answers with the seconds until its
result. `expect N` calls the task N times and has a hundred threads wait for the results; `joined` answers when they
have them.

Without DATABASE_URL the tasks are plain, and nothing of this package is imported unless the broker's URL says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from statistics import quantiles
from threading import Thread
from typing import Any

from celery import Celery, chord
from celery.result import AsyncResult, ResultSet

from benchmarks.client import EVERY_S, publish, serve
from benchmarks.note import note

THREADS = 100
LATEST_S = 300.0


def make_app(env: Mapping[str, str]) -> Celery:
    """Make the app that an environment describes."""
    app = Celery("results", broker=env["BROKER_URL"], backend=env["RESULT_BACKEND"], set_as_current=False)
    app.conf.broker_connection_retry_on_startup = False
    options: dict[str, Any] = {}
    if "DATABASE_URL" in env:
        from celery_sidejob import SideJob

        app.conf.sidejob_database_url = env["DATABASE_URL"]
        SideJob(app)
        options = {"durable": True, "on_lost": env["ON_LOST"]}
    elif env["BROKER_URL"].startswith("sidejob"):
        import celery_sidejob.transport  # noqa: F401  # makes sidejobpg:// known

    @app.task(name="value", shared=False, **options)
    def value(number: int) -> int:
        """Note the instant, and return the argument."""
        note()
        return number

    @app.task(name="total", shared=False, **options)
    def total(numbers: list[int]) -> int:
        """Return the sum."""
        return sum(numbers)

    return app


def main() -> None:
    """Serve until the input ends."""
    os.environ.pop("STAMPS")
    app = make_app(os.environ)
    client = Client(app)
    serve(
        {
            "trip": client.trip,
            "late": lambda: quantiles(client.trips_us, n=100)[98],
            "publish": lambda count: publish(lambda: app.tasks["value"].delay(1), count),
            "chord": client.chord,
            "expect": client.expect,
            "joined": client.joined,
        }
    )


class Client:
    """What is measured in the process of a client."""

    def __init__(self, app: Celery) -> None:
        self._value, self._total = app.tasks["value"], app.tasks["total"]
        self._threads: list[Thread] = []
        self._got: list[int] = []
        self.trips_us: list[float] = []

    def trip(self, count: int) -> float:
        """One call each 20 ms, when the result of the one before is there."""
        took_us = []
        for number in range(count):
            time.sleep(EVERY_S)
            begun = time.perf_counter()
            assert self._value.delay(number).get(timeout=LATEST_S) == number
            took_us.append(1e6 * (time.perf_counter() - begun))
        self.trips_us += took_us
        return sorted(took_us)[count // 2]

    def chord(self, count: int) -> float:
        """From the call to the result of the body."""
        begun = time.perf_counter()
        result = chord(self._value.s(number) for number in range(count))(self._total.s())
        assert result.get(timeout=LATEST_S) == sum(range(count))
        return time.perf_counter() - begun

    def expect(self, count: int) -> float:
        """Have threads wait, each for its part."""
        results = [self._value.delay(number) for number in range(count)]
        self._got.clear()
        self._threads = [Thread(target=self._wait, args=(results[first::THREADS],)) for first in range(THREADS)]
        for thread in self._threads:
            thread.start()
        return 0.0

    def joined(self) -> float:
        """Return how many results have come."""
        for thread in self._threads:
            thread.join()
        return len(self._got)

    def _wait(self, results: list[AsyncResult[int]]) -> None:
        self._got += ResultSet(results).get(timeout=LATEST_S)


if __name__ == "__main__":
    main()
elif "STAMPS" in os.environ:  # a worker
    app = make_app(os.environ)

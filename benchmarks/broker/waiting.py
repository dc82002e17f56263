"""A million messages that wait, against a thousand: what a fetch costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from benchmarks.broker.stage import Stage, told
from benchmarks.turns import Median
from celery_sidejob.store.broker import consumers, messages
from celery_sidejob.store.broker.messages import HIGHEST_PRIORITY, Row, Watermark
from celery_sidejob.store.schema.migrate import upgrade
from celery_sidejob.transport.postgres.link import Link

T = TypeVar("T")

WAITING = {"a thousand": 1000, "a million": 1_000_000}
BATCH = 16
FETCHES = 200
"""In each round."""
ROUNDS = 12
MOST = 1.4
ROW = Row("deep", 0, None, "{}", "{}", "x" * 600)


class Fetching:
    """A consumer of a database of its own, in which so many messages wait at any time."""

    def __init__(self, stage: Stage, count: int) -> None:
        stage.looking.execute(f"CREATE DATABASE waiting_{count}")
        url = urlsplit(stage.postgres.url)._replace(path=f"/waiting_{count}").geturl()
        upgrade(url)
        self.link = Link(url, "sidejob")
        self._consumer = self._run(lambda executor: consumers.register(executor, "benchmark", silence_s=3600.0))
        for _ in range(max(1, count // 50_000)):
            self._put(min(count, 50_000))
        self._done: list[int] = []
        self._low = 0

    def round_us(self) -> float:
        """Fetch again and again, acknowledging all, and return the microseconds of one fetch."""
        return 1e6 * sum(self._fetch_s() for _ in range(FETCHES)) / FETCHES

    def _fetch_s(self) -> float:
        watermarks = [Watermark("deep", priority, self._low) for priority in range(HIGHEST_PRIORITY, -1, -1)]
        holder, done, began = self._consumer, self._done, time.perf_counter()
        found = self._run(
            lambda executor: messages.fetch(
                executor, holder=holder, done=done, watermarks=watermarks, room=BATCH, reads=False
            )
        )
        took_s = time.perf_counter() - began
        assert len(found.rows) == BATCH
        self._done, self._low = [row.id for row in found.rows], found.rows[-1].id + 1
        self._put(BATCH)
        return took_s

    def _put(self, count: int) -> None:
        self._run(lambda executor: messages.put_all(executor, [ROW] * count))

    def _run(self, statement: Callable[..., T]) -> T:
        return self.link.run("benchmark", statement)


def measure(stage: Stage) -> bool:
    """Fetch by turns; tell whether the million costs little more."""
    sides = [Fetching(stage, count) for count in WAITING.values()]
    for side in sides:
        side.round_us()
    found = [[side.round_us() for side in sides] for _ in range(ROUNDS)]
    for number, name in enumerate(WAITING):
        print(f"a fetch of {BATCH} with {name} waiting: {Median.of([one[number] for one in found])} us")
    ratio = Median.of_ratios([one[1] for one in found], [one[0] for one in found])
    for side in sides:
        side.link.close()
    return told("a fetch with a million waiting, of one with a thousand", ratio, f"at most {MOST}", ratio.lower <= MOST)

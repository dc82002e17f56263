"""Ordinary durable tasks against plain Celery on the same Redis, in turns: publishing, running, waiting, and Postgres.

    python -m benchmarks durable [--rounds 30] [--only publish,many] [--slow-commit]

Plain Celery is as it comes: its clients and its workers import nothing of this package. As kombu makes a new Redis
client for each command, which our publisher and our workers do not, `publish` and the drains also show plain Celery
with that one thing mended. Running, waiting and Postgres are shown for durable tasks as they come and for those that
may be repeated (`on_lost="requeue"`), which are what the bounds are for.
Each figure is the median over rounds, with the interval in which it lies with 95 % certainty; a ratio is that inside a
round. Bodies note when they ran, so a drain begins with the worker's first look and ends with the last body; each must
have run exactly once, and then all rows must go.

With `--slow-commit` a commit takes a millisecond (`commit_delay`), as on a disk without a cache; then only `send_many`
is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psycopg
import redis

from benchmarks.idle import cpu_of, scalar
from benchmarks.servers import POOLS, servers
from benchmarks.stamped import Watched
from benchmarks.stamps import REQUEUE_SCHEMA, SCHEMA, make_app
from benchmarks.turns import Median, take_turns
from celery_sidejob.hooks.patches.connections import keep_client
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

PUBLISHED = 1000
MANY = 1000
RUN = 1000
WAITED_FOR = 50
EVERY_S = 0.02
CPU_TASKS = 6000
"""How many tasks a round of each kind has, and how many Postgres' processor time is shared by."""


@dataclass(frozen=True)
class Bound:
    """What a figure must reach; with `most` it is what it must not exceed. The interval's better end decides."""

    limit: float
    most: bool = False
    slow_too: bool = False

    def met_by(self, found: Median) -> bool:
        """Whether it is reached."""
        return found.lower <= self.limit if self.most else found.upper >= self.limit


BOUNDS = {
    "publish": Bound(0.78),
    "send_many, of one by one": Bound(3.0, slow_too=True),
    "send_many, of Producer.batch": Bound(0.95, slow_too=True),
    "drain, prefork -c 2": Bound(0.97),
    "drain, solo": Bound(0.95),
    "idle latency": Bound(1.15, most=True),
    "Postgres CPU": Bound(150.0, most=True),
    "Postgres CPU, send_many": Bound(150.0, most=True),
}
SECTIONS = ("publish", "many", "prefork", "solo", "latency", "cpu")
SLOW = "with commit_delay = 1000: each commit takes a millisecond"


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks durable", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--slow-commit", action="store_true", help="each commit takes a millisecond")
    given = parser.parse_args(arguments)
    wanted = given.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    with ExitStack() as stack:
        bench = stack.enter_context(Bench.opened(given.slow_commit))
        print_machine(bench._looking, bench.durable.redis, *([SLOW] if given.slow_commit else []))
        if "publish" in wanted:
            bench.publish(given.rounds)
        if "many" in wanted:
            bench.many(given.rounds)
        for name, (pool, concurrency) in POOLS.items():
            if pool in wanted:
                with bench.workers(pool, concurrency):
                    bench.drain(name, given.rounds)
        if {"latency", "cpu"} & set(wanted):
            with bench.workers(*POOLS["prefork -c 2"]):
                if "latency" in wanted:
                    bench.latency(given.rounds)
                if "cpu" in wanted:
                    bench.cpu()
    return 0 if bench.met else 1


class Side(Watched):
    """A client of one kind, with a database of its own in the same Redis, and perhaps a worker."""

    def __init__(
        self, broker_url: str, number: int, database_url: str | None, directory: Path, *, schema: str = SCHEMA,
        transport_options: dict[str, Any] | None = None, prefetch: int | None = None,
    ) -> None:  # fmt: skip
        """`prefetch`: the worker's `worker_prefetch_multiplier`; None for Celery's default."""
        super().__init__(directory / f"stamps{number}")
        self._flags = ["--loglevel=WARNING", *([] if prefetch is None else [f"--prefetch-multiplier={prefetch}"])]
        self.schema = None if database_url is None else schema
        self.broker_url = self._url_of(broker_url, number)
        self.database_url = database_url
        self.transport_options = transport_options or {}
        self.app = make_app(self.broker_url, database_url, schema=schema, transport_options=self.transport_options)
        self.stamp = self.app.tasks["stamp"]
        self.redis = redis.Redis.from_url(urlsplit(self.broker_url)._replace(scheme="redis").geturl())

    @property
    def client(self) -> list[str]:
        """The program that publishes for it, as `python -m` takes it."""
        return ["benchmarks.client"]

    @property
    def env(self) -> dict[str, str]:
        """What a process of this side, a client or a worker, needs to make the app."""
        env = {"BROKER_URL": self.broker_url, "STAMPS": str(self.stamps)}
        env["TRANSPORT_OPTIONS"] = json.dumps(self.transport_options)
        if self.database_url is not None and self.schema is not None:
            env |= {"DATABASE_URL": self.database_url, "SCHEMA": self.schema}
        return env

    def start_worker(self, processes: Processes, pool: str, concurrency: int, *, one_client: bool = False) -> None:
        """Start a worker, and wait until it runs what it is given."""
        env = self.env | ({"ONE_CLIENT": "1"} if one_client else {})
        self.worker = processes.start_worker(
            "benchmarks.stamps", env=env, pool=pool, concurrency=concurrency, extra=self._flags, ready_timeout=None
        )  # fmt: skip
        self.forget_stamps()
        self.stamp.delay()
        wait_until(lambda: self.count() >= 1, timeout=60, message="the worker to be ready")

    def waiting(self) -> int:
        """How many messages wait in the broker."""
        return int(self.redis.llen("celery"))

    def is_quiet(self) -> bool:
        """Whether the broker has no message, waiting or held."""
        return not self.redis.exists("celery", "unacked", *self.redis.keys("_sidejob.held.*"))

    def forget_messages(self) -> None:
        """Empty the broker."""
        self.redis.delete("celery")

    def _url_of(self, broker_url: str, number: int) -> str:
        """Return the URL of a broker of this side's own."""
        return f"{broker_url.rpartition('/')[0]}/{number}"

    def close(self) -> None:
        """Close what it has open; its worker is not ended."""
        self.redis.close()
        self.app.close()
        if self.database_url is not None:
            self.app.sidejob.close()


class Bench:
    """The servers, the sides, and what was found."""

    def __init__(self, postgres: Any, broker_url: str, directory: Path, processes: Processes, slow: bool) -> None:
        self._postgres = postgres
        self._processes = processes
        self._slow = slow
        self._looking = psycopg.connect(postgres.url, autocommit=True)
        if slow:
            for setting in ("commit_delay = 1000", "commit_siblings = 0"):
                self._looking.execute(f"ALTER SYSTEM SET {setting}")
            self._looking.execute("SELECT pg_reload_conf()")
        upgrade(postgres.url, REQUEUE_SCHEMA)
        self.durable = Side(broker_url, 0, postgres.url, directory)
        self.requeue = Side(broker_url, 3, postgres.url, directory, schema=REQUEUE_SCHEMA)
        self.plain = Side(broker_url, 1, None, directory)
        self.kept = Side(broker_url, 2, None, directory)
        with self.kept.app.producer_pool.acquire() as producer:
            keep_client(producer.channel)
        self.met = True

    @classmethod
    @contextmanager
    def opened(cls, slow: bool) -> Iterator[Bench]:
        """Start the servers; everything ends with the block."""
        with ExitStack() as stack:
            postgres, broker_url = stack.enter_context(servers(appendonly=False))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            processes = Processes(directory / "processes", stack.enter_context(Guard()))
            stack.callback(processes.kill_all)
            bench = cls(postgres, broker_url, directory, processes, slow)
            stack.callback(bench._looking.close)
            for side in (bench.durable, bench.requeue, bench.plain, bench.kept):
                stack.callback(side.close)
            yield bench

    @contextmanager
    def workers(self, pool: str, concurrency: int) -> Iterator[None]:
        """Workers for plain tasks, as it comes and with its client kept, and for durable ones, each of its own app."""
        sides = (self.plain, self.kept, self.durable, self.requeue)
        for side in sides:
            side.start_worker(self._processes, pool, concurrency, one_client=side is self.kept)
            self._wait_empty(side)  # of a fresh broker, into which all that nobody holds is sent once more
        yield
        for side in sides:
            assert side.worker is not None
            assert side.worker.alive
            self._processes.end(side.worker)

    # -- what is measured ----------------------------------------------------------------------------------------

    def publish(self, rounds: int) -> None:
        """One call after the other, with nobody who listens."""
        found = take_turns(
            {
                "plain delay()": partial(self._publish, self.plain),
                "plain, one Redis client kept": partial(self._publish, self.kept),
                "durable delay()": partial(self._publish, self.durable),
            },
            rounds,
        )
        self._show(found, "per second")
        self._compare("publish", found, "durable delay()", "plain delay()")
        self._compare("", found, "durable delay()", "plain, one Redis client kept")

    def many(self, rounds: int) -> None:
        """A thousand tasks: one by one, by kombu's batch, by ours."""
        found = take_turns(
            {
                "plain, one by one": partial(self._publish, self.plain, MANY),
                "plain, Producer.batch": partial(self._timed, self.plain, MANY, self._batch),
                "send_many": partial(self._timed, self.durable, MANY, self._send_many),
            },
            rounds,
        )
        self._show(found, "per second")
        self._compare("send_many, of one by one", found, "send_many", "plain, one by one")
        self._compare("send_many, of Producer.batch", found, "send_many", "plain, Producer.batch")

    def drain(self, pool: str, rounds: int) -> None:
        """A thousand tasks that were published while the worker stood still."""
        found = take_turns(
            {
                "plain": partial(self._drain, self.plain),
                "plain, one Redis client kept": partial(self._drain, self.kept),
                "durable": partial(self._drain, self.durable),
                "durable, requeue": partial(self._drain, self.requeue),
            },
            rounds,
        )
        self._show(found, f"per second, {pool}")
        self._compare("", found, "durable", "plain")
        self._compare(f"drain, {pool}", found, "durable, requeue", "plain")
        self._compare("", found, "durable, requeue", "plain, one Redis client kept")

    def latency(self, rounds: int) -> None:
        """From the call to the body's first line, one task every 20 ms."""
        found = take_turns(
            {
                "plain": partial(self._wait, self.plain),
                "durable": partial(self._wait, self.durable),
                "durable, requeue": partial(self._wait, self.requeue),
            },
            rounds,
        )
        self._show(found, "us, p50 of an idle worker")
        self._compare("", found, "durable", "plain")
        self._compare("idle latency", found, "durable, requeue", "plain")

    def cpu(self) -> None:
        """All of Postgres' processes, over publishing, running and removing."""
        for name, side, publish in (
            ("durable", self.durable, self._one_by_one),
            ("Postgres CPU", self.requeue, self._one_by_one),
            ("Postgres CPU, send_many", self.requeue, self._send_many),
        ):
            before = cpu_of(self._postgres.pid)
            for _ in range(CPU_TASKS // RUN):
                self._drain(side, publish)
            spent = (cpu_of(self._postgres.pid) - before) / CPU_TASKS * 1e6
            what = "durable, requeue" if side is self.requeue else "durable"
            how = "by send_many" if publish == self._send_many else "one by one"
            text = f"{what}, published {how}: {spent:.0f} us of Postgres per task, of {CPU_TASKS}"
            self._judge(name, Median(spent, spent, spent), text)

    # ------------------------------------------------------------------------------------------------------------

    def _publish(self, side: Side, count: int = PUBLISHED) -> float:
        return self._timed(side, count, self._one_by_one)

    def _one_by_one(self, side: Side, count: int) -> None:
        for _ in range(count):
            side.stamp.delay()

    def _batch(self, side: Side, count: int) -> None:
        with side.app.producer_pool.acquire(block=True) as producer, producer.batch():
            for _ in range(count):
                side.stamp.apply_async(producer=producer)

    def _send_many(self, side: Side, count: int) -> None:
        side.app.sidejob.send_many([side.stamp.s() for _ in range(count)])

    def _timed(self, side: Side, count: int, work: Callable[[Side, int], None]) -> float:
        begun = time.perf_counter()
        work(side, count)
        rate = count / (time.perf_counter() - begun)
        assert side.redis.llen("celery") == count
        side.forget_messages()
        if side.schema is not None:
            assert self._rows(side) == count
            self._looking.execute(f"DELETE FROM {side.schema}.messages")
        return rate

    def _drain(self, side: Side, publish: Callable[[Side, int], None] | None = None) -> float:
        assert side.worker is not None
        side.worker.stop_signal()
        side.forget_stamps()
        (publish or self._one_by_one)(side, RUN)
        if side.schema is not None:
            assert self._rows(side) == RUN
        rate = side.drained(RUN)
        self._wait_quiet(side, RUN)
        return rate

    def _wait(self, side: Side) -> float:
        side.forget_stamps()
        called = []
        for number in range(WAITED_FOR):
            time.sleep(EVERY_S)
            called.append(time.monotonic_ns())
            side.stamp.delay()
            wait_until(lambda: side.count() == number + 1, timeout=30, interval=0.002)  # noqa: B023
        self._wait_quiet(side, WAITED_FOR)
        return median(one - other for one, other in zip(side.read_stamps(), called, strict=True)) / 1000

    def _wait_quiet(self, side: Side, count: int) -> None:
        self._wait_empty(side)
        assert side.count() == count, "each body runs once"

    def _wait_empty(self, side: Side) -> None:
        if side.schema is not None:
            wait_until(lambda: not self._rows(side), timeout=30, interval=0.01, message="all rows to be gone")
        wait_until(lambda: not side.redis.exists("celery", "unacked"), timeout=30)

    def _rows(self, side: Side) -> int:
        return scalar(self._looking, f"SELECT count(*) FROM {side.schema}.messages")

    # -- what is said --------------------------------------------------------------------------------------------

    def _show(self, found: dict[str, list[float]], unit: str) -> None:
        print(f"\n{unit}")
        for side, figures in found.items():
            print(f"  {side:36}{median(figures):8.0f}")

    def _compare(self, name: str, found: dict[str, list[float]], ours: str, theirs: str) -> None:
        ratio = Median.of_ratios(found[ours], found[theirs])
        self._judge(name, ratio, f"{ours}, of {theirs}: {ratio}")

    def _judge(self, name: str, found: Median, text: str) -> None:
        bound = BOUNDS.get(name)
        if bound is not None and (bound.slow_too or not self._slow):
            met = bound.met_by(found)
            self.met &= met
            text += f"   bound {'at most' if bound.most else 'at least'} {bound.limit:g}: {'met' if met else 'MISSED'}"
        print(f"  {text}", flush=True)


def print_machine(looking: psycopg.Connection[Any], broker: redis.Redis, *remarks: str) -> None:
    """What this was measured on."""
    postgres = looking.info.parameter_status("server_version")
    packages = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis", "psycopg"))
    about = broker.info("server")
    name = about.get("server_name", "redis")
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} x {_processor()}, Python {platform.python_version()}")
    print(f"{packages}; Postgres {postgres}, {name} {about.get(f'{name}_version')}")
    for remark in remarks:
        print(remark)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())

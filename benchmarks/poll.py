"""What the sweeper's turns cost over a million durable tasks that are kept, a hundred thousand of which wait in Redis.

    python -m benchmarks poll [--rows 1000000] [--waiting 100000]

nothing due         every row is to be looked at later
a backlog is due    those that wait in Redis are checked, all at once: none may be published again
everything is due   the rest too, of which Redis has nothing: each is struck, once
published again     the first turns after that, in which what was struck is published

Time is that of one turn, after which a worker's sweeper has other duties; memory is what the process takes more than
before, at most; statements are those that Postgres has counted, and Redis' slowest command is from its SLOWLOG.
"""

from __future__ import annotations

import argparse
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median

import psutil
import psycopg
import redis
from celery import Celery

from benchmarks.idle import scalar
from celery_sidejob import SideJob, embedded
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store.outbox import publishing
from celery_sidejob.store.outbox.kinds import TASKS
from celery_sidejob.store.schema.migrate import upgrade

QUEUE = "waits"
OTHERS = 10
"""Queues among which the rows are spread whose messages Redis does not have."""
TURNS = 20
SLOW_US = 20
MEGABYTE = 1e6

FILL = """
INSERT INTO sidejob.messages
  (task_id, task, queue, publication, body, generation, due_at, published_at, next_check_at, check_interval)
SELECT id, m.task, q, replace(replace(m.publication, 'the-task-id', id), '"{queue}\\"', '"' || q || '\\"'), m.body,
  1, now(), now() - interval '30 min', now() + interval '1 hour', '30 s'
FROM sidejob.messages m, generate_series(1, {rows}) n,
  LATERAL (SELECT 'task-' || lpad(n::text, 31, '0') AS id,
    CASE WHEN n <= {waiting} THEN '{queue}' ELSE 'gone-' || n % {others} END AS q) of
WHERE m.task_id = 'the-task-id'"""
BACKLOG = "UPDATE sidejob.messages SET next_check_at = now() WHERE queue = '{queue}'"
EVERYTHING = "UPDATE sidejob.messages SET next_check_at = now()"
STRUCK = "UPDATE sidejob.messages SET next_check_at = now() WHERE suspected_at IS NOT NULL"


@dataclass
class Cost:
    """What turns have cost."""

    name: str
    turns_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    statements: int = 0
    growth: int = 0
    read: int = 0
    slowest: str = ""
    published: int = 0

    def __str__(self) -> str:
        turns = len(self.turns_s)
        return (
            f"{self.name:20}{turns:6}{1e3 * median(self.turns_s):9.1f}{1e3 * max(self.turns_s):9.1f}{self.took_s:9.1f}"
            f"{self.statements / turns:9.1f}{self.growth / MEGABYTE:9.1f}{self.read / turns / MEGABYTE:9.2f}"
            f"{self.published:9}  {self.slowest}"
        )


HEADING = (
    f"{'':20}{'turns':>6}{'p50 ms':>9}{'max ms':>9}{'all s':>9}{'stmts':>9}{'RSS +MB':>9}{'read MB':>9}{'again':>9}  "
    "slowest command of Redis"
)


def main(arguments: list[str]) -> int:
    """Fill, poll, print; return 1 if what waits was published again, or if something was not bounded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks poll", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--waiting", type=int, default=100_000)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        bench = Bench(stack, given.rows, given.waiting)
        print(HEADING, flush=True)
        idle = bench.turns("nothing due", lambda turn: turn < TURNS)
        print(idle, flush=True)
        bench.sql(BACKLOG.format(queue=QUEUE))
        backlog = bench.turns("a backlog is due", lambda _: bench.is_due())
        print(backlog, flush=True)
        bench.sql(EVERYTHING)
        everything = bench.turns("everything is due", lambda _: bench.is_due())
        print(everything, flush=True)
        waiting = bench.client.llen(QUEUE)
        bench.sql(STRUCK)
        print(bench.turns("published again", lambda turn: turn < TURNS), flush=True)
    print(__doc__[__doc__.index("nothing due") :].rstrip())
    return 0 if backlog.published == everything.published == 0 and waiting == given.waiting else 1


class Bench:
    """A store and a broker that are full, and a sweeper."""

    def __init__(self, stack: ExitStack, rows: int, waiting: int) -> None:
        postgres = stack.enter_context(embedded.Postgres(durable=True))
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
        postgres.restart()
        upgrade(postgres.url)
        self._looking = stack.enter_context(psycopg.connect(postgres.url, autocommit=True))
        self._looking.execute("CREATE EXTENSION pg_stat_statements")
        broker_url = stack.enter_context(embedded.Valkey()).url
        self.client = stack.enter_context(redis.Redis.from_url(broker_url))
        app = Celery("poll", broker=broker_url, set_as_current=False)
        app.conf.update(sidejob_database_url=postgres.url, sidejob_durable_tasks=["poll.*"], sidejob_lost_after=3600)
        sidejob = SideJob(app)
        stack.callback(sidejob.close)
        self._connections = sidejob.runtime.connections
        self._sweeper = Sweeper(sidejob.runtime)
        self._sweeper.run_once()  # which puts its marker there
        app.send_task("poll.mail", ("somebody@example.org", {"about": "x" * 100}), task_id="the-task-id", queue=QUEUE)
        begun = time.perf_counter()
        self._fill(rows, waiting)
        print(f"filled with {rows} rows and {waiting} messages in {time.perf_counter() - begun:.0f} s", flush=True)

    def _fill(self, rows: int, waiting: int) -> None:
        self.sql(FILL.format(rows=rows, waiting=waiting, queue=QUEUE, others=OTHERS))
        self.sql("DELETE FROM sidejob.messages WHERE task_id = 'the-task-id'")
        self.sql("VACUUM ANALYZE sidejob.messages")
        (text,) = self.client.lrange(QUEUE, 0, -1)
        self.client.delete(QUEUE)
        for first in range(0, waiting, 1000):
            with self.client.pipeline(transaction=False) as pipe:
                for number in range(first + 1, first + 1001):
                    pipe.lpush(QUEUE, text.replace(b"the-task-id", b"task-%031d" % number))
                pipe.execute()
        self.client.config_set("slowlog-log-slower-than", SLOW_US)
        self.client.config_set("slowlog-max-len", 100_000)

    def sql(self, statement: str) -> None:
        """Run SQL."""
        self._looking.execute(statement)

    def count(self, query: str) -> int:
        """The one value of a query."""
        return scalar(self._looking, query)

    def is_due(self) -> bool:
        """Whether anything is to be looked at now."""
        return bool(publishing.candidates(self._connections, TASKS, per_queue=1, limit=1))

    def turns(self, name: str, more: Callable[[int], bool]) -> Cost:
        """Have the sweeper do its turns as long as there are more to do."""
        cost = Cost(name)
        self.client.slowlog_reset()
        read = self._read()
        counted = 0
        with growing() as growth:
            while more(len(cost.turns_s)):
                self.sql("SELECT pg_stat_statements_reset()")
                begun = time.perf_counter()
                report = self._sweeper.run_once()
                cost.turns_s.append(time.perf_counter() - begun)
                counted += self.count("SELECT sum(calls)::bigint FROM pg_stat_statements") - 1  # the reset
                cost.published += report.published if report is not None else 0
        cost.took_s, cost.statements, cost.growth = sum(cost.turns_s), counted, growth[0]
        cost.read = self._read() - read
        cost.slowest = self._slowest()
        return cost

    def _read(self) -> int:
        return int(self.client.info("stats")["total_net_output_bytes"])

    def _slowest(self) -> str:
        ours = [one for one in self.client.slowlog_get(100_000) if not re.match(b"SLOWLOG|CONFIG|INFO", one["command"])]
        if not ours:
            return f"none above {SLOW_US} us"
        worst = max(ours, key=lambda one: int(one["duration"]))
        return f"{worst['duration']} us: {worst['command'].decode(errors='replace')[:60]}"


@contextmanager
def growing() -> Iterator[list[int]]:
    """Yields how many bytes of memory this process takes more than at the beginning, at most."""
    process, over = psutil.Process(), threading.Event()
    before, most = process.memory_info().rss, [0]

    def look() -> None:
        while not over.wait(0.005):
            most[0] = max(most[0], process.memory_info().rss - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()

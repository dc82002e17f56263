"""What workers that have nothing to do cost their store: connections, statements and Postgres' processor time.

    python -m benchmarks idle --workers 50 --seconds 60 [--real] [--pgbouncer]

By default a few processes host the services of many workers: heartbeat, errands and sweeper with the connections that
a worker has. That is all of a worker that speaks to the store while it is idle. With `--real` each is a whole
`celery worker --pool=solo`, which takes some 90 MB of memory and two seconds of a core to start. With `--pgbouncer`
all but the liveness locks goes through a PgBouncer in transaction mode; with `--no-lock` there are none.

Statements are counted by pg_stat_statements, BEGIN and COMMIT too, transactions by pg_stat_database, and processor
time is that of all of Postgres' processes, from /proc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import SideJob, embedded
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.loop import Loop
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.guard import Guard
from tests.tools.pgbouncer import MISSING, PROGRAM, PgBouncer
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

STATEMENTS_PER_S = 60.0
CORE = 0.03
"""What is allowed for 50 workers."""

SETTLING_S = 10.0
"""What happens once at the start is over by then: connections that were opened for it are closed."""

HOSTS = 5


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if it costs more than is allowed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks idle", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--real", action="store_true", help="whole worker processes")
    parser.add_argument("--pgbouncer", action="store_true", help="through a PgBouncer in transaction mode")
    parser.add_argument("--no-lock", action="store_true", help="with --pgbouncer: without sidejob_direct_url")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.host is not None:
        return host(given.host)
    if given.pgbouncer and PROGRAM is None:
        raise SystemExit(MISSING)
    with ExitStack() as stack:
        postgres, urls = store(stack, given)
        broker_url = stack.enter_context(embedded.Valkey()).url
        processes = stack.enter_context(started_processes())
        env = {**urls, "DATABASE_URL": urls["SIDEJOB_DATABASE_URL"], "BROKER_URL": broker_url}
        start(processes, given, env)
        looking = stack.enter_context(psycopg.connect(postgres.url, autocommit=True))
        count = "SELECT count(*) FROM sidejob.workers WHERE dead_at IS NULL"
        wait_until(lambda: looking.execute(count).fetchone() == (given.workers,), timeout=600)
        time.sleep(SETTLING_S)
        found = measure(looking, postgres.pid, given.seconds)
        assert looking.execute(count).fetchone() == (given.workers,), "a worker was declared dead meanwhile"
    print(found.table(given))
    return 0 if found.allowed(given.workers) else 1


def store(stack: ExitStack, given: argparse.Namespace) -> tuple[embedded.Postgres, dict[str, str]]:
    """A Postgres that counts statements, with our schema, and the settings by which workers reach it."""
    postgres = stack.enter_context(embedded.Postgres(durable=True))
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
        connection.execute("ALTER SYSTEM SET max_connections = 300")
    postgres.restart()
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION pg_stat_statements")
    upgrade(postgres.url)
    urls = {"SIDEJOB_DATABASE_URL": postgres.url}
    if given.pgbouncer:
        proxy = stack.enter_context(PgBouncer(postgres.url, server_round_robin="0", min_pool_size="0"))
        urls = {"SIDEJOB_DATABASE_URL": proxy.url_of(postgres.url), "SIDEJOB_DIRECT_URL": postgres.url}
        if given.no_lock:
            del urls["SIDEJOB_DIRECT_URL"]
    return postgres, urls


@contextmanager
def started_processes() -> Iterator[Processes]:
    """Starts processes, and ends them with the block."""
    with tempfile.TemporaryDirectory() as directory, Guard() as guard:
        processes = Processes(Path(directory) / "processes", guard)
        try:
            yield processes
        finally:
            processes.kill_all()


def start(processes: Processes, given: argparse.Namespace, env: dict[str, str]) -> None:
    """Start the workers; they are ready some time later."""
    if given.real:
        for number in range(given.workers):  # one after the other: all at once would starve each other
            processes.start_worker("benchmarks.app", env=env, pool="solo", name=f"idle{number}", ready_timeout=120)
        return
    for number in range(HOSTS):
        share = (given.workers + number) // HOSTS
        processes.start(
            [sys.executable, "-m", "benchmarks", "idle", "--host", str(share)], env=env, name=f"host{number}"
        )


def host(count: int) -> int:
    """Be the services of so many workers until the end."""
    for number in range(count):
        app = Celery(f"host{number}", broker=os.environ["BROKER_URL"], set_as_current=False)
        runtime = SideJob(app).runtime
        heartbeat = Heartbeat(runtime)
        heartbeat.register()
        for service in (
            heartbeat,
            heartbeat.errands,
            Sweeper(runtime, heartbeat),
        ):
            Loop(service).start()
        time.sleep(0.2)  # workers are not started in the same instant either
    while True:
        time.sleep(60)


@dataclass(frozen=True)
class Cost:
    """What was counted in a time."""

    seconds: float
    statements: int
    transactions: int
    cpu_s: float
    connections: int

    def allowed(self, workers: int) -> bool:
        """Whether it is within what is allowed for so many workers."""
        share = workers / 50
        return self.statements / self.seconds <= STATEMENTS_PER_S * share and self.cpu_s / self.seconds <= CORE * share

    def table(self, given: argparse.Namespace) -> str:
        """The figures, a line each."""
        how = "worker processes" if given.real else f"workers' services in {HOSTS} processes"
        way = "" if not given.pgbouncer else " through PgBouncer" + (", no liveness locks" if given.no_lock else "")
        return "\n".join(
            [
                f"{given.workers} idle {how}{way}, {self.seconds:.0f} s, on {os.cpu_count()} cores",
                f"connections to Postgres    {self.connections:8}",
                f"statements per second      {self.statements / self.seconds:8.1f}   ({STATEMENTS_PER_S:g} for 50)",
                f"transactions per second    {self.transactions / self.seconds:8.1f}",
                f"Postgres, % of a core      {100 * self.cpu_s / self.seconds:8.2f}   ({100 * CORE:g} for 50)",
            ]
        )


def measure(looking: psycopg.Connection[Any], postmaster: int, seconds: float) -> Cost:
    """Count for so long."""
    # Its own look-ups are not counted: they are the two statements at the end.
    looking.execute("SELECT pg_stat_statements_reset()")
    transactions, cpu_s, begun = committed(looking), cpu_of(postmaster), time.monotonic()
    time.sleep(seconds)
    statements = scalar(looking, "SELECT sum(calls)::bigint FROM pg_stat_statements")
    took = time.monotonic() - begun
    cpu_s, transactions = cpu_of(postmaster) - cpu_s, committed(looking) - transactions
    connections = scalar(looking, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'celery_sidejob'")
    for row in looking.execute("SELECT calls, left(query, 100) FROM pg_stat_statements ORDER BY 1 DESC LIMIT 12"):
        print(*row)
    return Cost(took, statements, transactions, cpu_s, connections)


def committed(looking: psycopg.Connection[Any]) -> int:
    """How many transactions this database has seen; backends tell of theirs with a delay of seconds."""
    return scalar(looking, "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")


def scalar(looking: psycopg.Connection[Any], query: str) -> int:
    """The one value of a query."""
    row = looking.execute(query).fetchone()
    return int(row[0]) if row else 0


def cpu_of(parent: int) -> float:
    """The processor time, in seconds, of a process, such as a Postgres, and its children, those that have ended too."""
    ticks = 0
    listing = subprocess.run(["ps", "--ppid", str(parent), "-o", "pid="], capture_output=True, text=True)
    for pid in [parent, *map(int, listing.stdout.split())]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue
        # utime and stime; of the parent also what its ended children had used
        ticks += sum(map(int, fields[11:15] if pid == parent else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")

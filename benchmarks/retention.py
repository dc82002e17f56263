"""What clients and workers notice of the pruner, which removes 50,000 finished jobs whose time is over at once.

    python -m benchmarks retention [--jobs 50000] [--rounds 5] [--seconds 4]

One Postgres. Each round makes so many finished jobs, with an asking, a tag and a key of state each. For some seconds
nothing is pruned; then the sweeper's duty prunes them in a process of its own, in a worker's slices and with its
pauses, to the end. In both stretches one thread makes jobs with the same tag, claims them, ends them, asks one of them
again and reads others. A second thread asks jobs that are due to be pruned.

Postgres logs each wait for a lock that takes longer than a millisecond, and who holds it. The first thread must never
wait for the pruner. The second may: an ask of a job that is being deleted learns with its commit that it is gone.

It ends with 1 if the first thread waited for the pruner, if the pruner deleted more in one transaction than it may, or
if a median of the first thread's takes more than 1.5 times as long beside the pruner.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery

from benchmarks.suspended import quantile
from benchmarks.turns import Median
from celery_sidejob import Job, JobNotFoundError, SideJob, embedded
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.sweep import prune
from celery_sidejob.services.sweep.sweep import Sweep
from celery_sidejob.services.sweep.sweeper import TICK_S
from celery_sidejob.store import workers
from celery_sidejob.store.schema.migrate import upgrade
from celery_sidejob.store.statement import Statement

ALLOWED = 1.5
"""How much longer the median of a step may take beside the pruner."""
ASKS_PAUSE_S = 0.01

FILL = """
WITH made AS (
  INSERT INTO sidejob.jobs (task, queue, status, run_no, ended_run, ended_at, ran_at, retention_s)
  SELECT 'done', 'old', 'completed', 1, 1, now() - interval '1 hour', now() - interval '1 hour', 60
  FROM generate_series(1, {jobs}) RETURNING id),
asked AS (
  INSERT INTO sidejob.askings (task_id, job_id, closed_at, outcome, result, stored_at)
  SELECT gen_random_uuid()::text, id, now(), 'completed', '1', now() FROM made),
tagged AS (INSERT INTO sidejob.tags (tag, job_id) SELECT 'nightly', id FROM made)
INSERT INTO sidejob.state SELECT id, 'page', '1' FROM made;
VACUUM ANALYZE;
CHECKPOINT"""

WAIT = re.compile(r"process (\d+) still waiting for .*?\n.*?DETAIL:  Process(?:es)? holding the lock: ([\d, ]+)\.")


@dataclass
class Backends:
    """The processes of Postgres that serve each side; a connection that was idle for long is another one afterwards."""

    clients: set[int] = field(default_factory=set)
    askers: set[int] = field(default_factory=set)
    pruners: set[int] = field(default_factory=set)


@dataclass
class Times:
    """Seconds of each step, and how often an ask won or lost, of one stretch."""

    steps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    took_s: float = 0.0
    won: int = 0
    lost: int = 0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the block as this step."""
        begun = time.perf_counter()
        yield
        self.steps[name].append(time.perf_counter() - begun)


class Client:
    """Makes jobs, runs them, asks them again and reads them: one thread's work, on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.sidejob = _sidejob(url)
        self._runtime = self.sidejob.runtime
        self._task = self.sidejob.task(noop, name="noop", tags=["nightly"])
        self._worker_id = workers.register(self._runtime.connections, str(uuid.uuid4()))

    def work(self, times: Times) -> None:
        """Do each step once."""
        with times.step("enqueue"):
            job = self.sidejob.enqueue(self._task)
        self._run(job, 1, times)
        with times.step("ask again"):
            job.run()
        self._run(job, 2, times)
        with times.step("read"):
            assert job.refresh().status == "completed"

    def _run(self, job: Job, number: int, times: Times) -> None:
        with times.step("claim"):
            hold = runs.claim(self._runtime, job.id, task="noop", for_run=number, worker_id=self._worker_id)
        assert hold is not None
        with times.step("end"):
            endings.end(self._runtime, hold, Unit(), Ending(RunEnd.COMPLETED))


class Asker:
    """Asks jobs that are due to be pruned, one after the other."""

    def __init__(self, url: str) -> None:
        self.sidejob = _sidejob(url)
        self.ids: list[int] = []
        self.dice = random.Random(1)

    def work(self, times: Times) -> None:
        """Ask one."""
        try:
            with times.step("ask a job that is due"):
                Job(self.dice.choice(self.ids), runtime=self.sidejob.runtime).run()
            times.won += 1
        except JobNotFoundError:
            times.lost += 1
        time.sleep(ASKS_PAUSE_S)


def main(arguments: list[str]) -> int:
    """Measure, print, and return 1 if the pruner was noticed more than it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks retention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each stretch without the pruner")
    parser.add_argument("--prune", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.prune:
        return be_the_pruner(given.prune)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # Postgres may run as another user
        with embedded.Postgres(Path(directory) / "pg") as postgres:
            _log_waits(postgres)
            upgrade(postgres.url)
            return _measure(postgres.url, Path(directory) / "pg" / "log", given)


def _measure(url: str, log: Path, given: argparse.Namespace) -> int:
    client, asker = Client(url), Asker(url)
    command = [sys.executable, "-m", "benchmarks", "retention", "--prune", url]
    pruner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert pruner.stdin is not None
    assert pruner.stdout is not None
    try:
        quiet, beside, told, backends = [], [], [], Backends()
        for number in range(given.rounds + 1):
            asker.ids = _fill(url, given.jobs)
            backends.clients.add(backend_of(client.sidejob))
            backends.askers.add(backend_of(asker.sidejob))
            until = time.monotonic() + given.seconds
            without = _stretch(client, asker, lambda until=until: time.monotonic() >= until)
            done = threading.Event()
            answers: list[str] = []

            def prune_all(answers: list[str] = answers, done: threading.Event = done) -> None:
                print(file=pruner.stdin, flush=True)
                answers.append(pruner.stdout.readline())  # type: ignore[union-attr]
                done.set()

            thread = threading.Thread(target=prune_all)
            thread.start()
            meanwhile = _stretch(client, asker, done.is_set)
            thread.join()
            figures = [float(word) for word in answers[0].split()]
            backends.pruners.add(int(figures.pop()))
            if number:  # the first round is for caches and plans
                quiet.append(without)
                beside.append(meanwhile)
                told.append(figures)
        waits = [_waits(log, backends.pruners, of) for of in (backends.clients, backends.askers)]
        return _table(given, quiet, beside, told, waits)
    finally:
        pruner.stdin.close()
        pruner.wait()
        client.sidejob.close()
        asker.sidejob.close()


def _stretch(client: Client, asker: Asker, is_over: Callable[[], bool]) -> Times:
    """Have both threads work until it is over."""
    times, asks = Times(), Times()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            asker.work(asks)

    thread = threading.Thread(target=ask)
    begun = time.monotonic()
    thread.start()
    while not is_over():
        client.work(times)
    times.took_s = time.monotonic() - begun
    stop.set()
    thread.join()
    times.steps |= asks.steps
    times.won, times.lost = asks.won, asks.lost
    return times


def _table(
    given: argparse.Namespace, quiet: list[Times], beside: list[Times], told: list[list[float]], waits: list[int]
) -> int:
    print(f"{given.jobs} jobs due at once, {given.rounds} rounds, on {os.cpu_count()} cores")
    print(f"{'step':24}{'p50':>8}{'p99':>8}{'max':>8}  ms {'p50':>8}{'p99':>8}{'max':>8}  ms   ratio of p50, of p99")
    late = []
    for name in quiet[0].steps:
        shown = ""
        for side in (quiet, beside):
            every = [seconds for times in side for seconds in times.steps[name]]
            figures = (quantile(every, 0.5), quantile(every, 0.99), max(every))
            shown += "".join(f"{figure * 1000:8.2f}" for figure in figures) + ("  ms " if side is quiet else "  ms")
        middle, tail = (
            Median.of_ratios(*([quantile(times.steps[name], share) for times in side] for side in (beside, quiet)))
            for share in (0.5, 0.99)
        )
        print(f"{name:24}{shown}   {middle}, {tail}")
        late += [name] if middle.middle > ALLOWED and "due" not in name else []
    rates = [[len(times.steps["enqueue"]) / times.took_s for times in side] for side in (beside, quiet)]
    print(f"steps a second, beside the pruner against without it: {Median.of_ratios(*rates)}")
    removed, seconds, most, longest = zip(*told, strict=True)
    print(
        f"the pruner: {statistics.median(removed):.0f} jobs in {statistics.median(seconds):.1f} s; at most "
        f"{max(most):.0f} in one transaction, which took {max(longest) * 1000:.0f} ms at most"
    )
    won, lost = (sum(getattr(times, which) for times in beside) for which in ("won", "lost"))
    print(f"asks of jobs that were due, beside the pruner: {won} came first, {lost} found the job gone")
    print(f"waits for a lock of the pruner above 1 ms: {waits[0]} of other work, {waits[1]} of these asks")
    print("later than allowed: " + (", ".join(late) or "none"))
    return int(bool(late) or waits[0] > 0 or max(most) > prune.ROOTS)


def be_the_pruner(url: str) -> int:
    """For each line of the input prune all that is due, as a worker's sweeper, and say how that went.

    A line of the output has the jobs removed, the seconds, the most jobs of one transaction, the longest one's seconds,
    and the process of Postgres.
    """
    sidejob = _sidejob(url)
    heartbeat = Heartbeat(sidejob.runtime)
    heartbeat.register()
    deleted: list[tuple[int, float]] = []
    original = prune.delete_finished

    def delete_finished(*given: Any, **more: Any) -> int | None:
        begun = time.perf_counter()
        gone = original(*given, **more)
        deleted.append((gone or 0, time.perf_counter() - begun))
        return gone

    prune.delete_finished = delete_finished
    for _ in sys.stdin:
        deleted.clear()
        begun = time.monotonic()
        duty = prune.Prune(Sweep(sidejob.runtime, heartbeat))
        while duty.is_due():
            duty.run_once()
            time.sleep(TICK_S)
        took_s = time.monotonic() - begun - TICK_S
        print(
            sum(gone for gone, _ in deleted), took_s, max(gone for gone, _ in deleted), max(s for _, s in deleted),
            backend_of(sidejob), flush=True,
        )  # fmt: skip
    return 0


def _fill(url: str, count: int) -> list[int]:
    """Make so many jobs that are due, remove all others, and return the ids of the jobs that are due."""
    with psycopg.connect(url, autocommit=True, options="-c synchronous_commit=off") as connection:
        connection.execute("DELETE FROM sidejob.jobs")
        for statement in FILL.format(jobs=count).split(";\n"):
            connection.execute(statement)
        return [row[0] for row in connection.execute("SELECT id FROM sidejob.jobs WHERE task = 'done'")]


def _log_waits(postgres: embedded.Postgres) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET deadlock_timeout = '1ms'")
        connection.execute("ALTER SYSTEM SET log_lock_waits = on")
        connection.execute("SELECT pg_reload_conf()")


def _waits(log: Path, holders: set[int], waiters: set[int]) -> int:
    """Count how often one of these backends waited for one of the holders."""
    return sum(
        int(waiter) in waiters and not holders.isdisjoint(map(int, holding.split(", ")))
        for waiter, holding in WAIT.findall(log.read_text())
    )


def _sidejob(url: str) -> SideJob:
    app = Celery("retention", broker="memory://", set_as_current=False)
    app.conf.update(sidejob_database_url=url, task_ignore_result=True)
    return SideJob(app)


def backend_of(sidejob: SideJob) -> int:
    """Return the process of Postgres that serves this app's only connection, and go on using it."""
    return int(sidejob.runtime.connections.run(Statement("SELECT pg_backend_pid() AS pid"))[0].pid)


def noop(job: Any) -> None:
    """Do nothing."""

"""A store, a broker and the processes around them, as one test sees them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import pytest

from celery_sidejob import Job
from tests.acceptance.outage_app import CONFIGURATION, make_app
from tests.acceptance.outage_jobs import GATES, open_gate
from tests.tools.brokers import Broker
from tests.tools.databases import Eye
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Process, Processes, WorkerProcess

APP = "tests.acceptance.outage_app"
STOP_S = 50.0
T = TypeVar("T")


class Site:
    """Starts workers and clients of one configuration, opens gates, and looks into the store by itself."""

    def __init__(self, directory: Path, processes: Processes, record: Record, **configuration: Any) -> None:
        self.configuration = configuration
        self.record = record
        self._gates = directory / "gates"
        self._processes = processes
        self.app = make_app(configuration)
        self.sidejob = self.app.sidejob
        self._eye = Eye(self.database_url)

    @property
    def database_url(self) -> str:
        """By which it reaches its store."""
        return str(self.configuration["sidejob_database_url"])

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to be part of this."""
        return {CONFIGURATION: json.dumps(self.configuration), GATES: str(self._gates), **self.record.env}

    def start_worker(self, **options: Any) -> WorkerProcess:
        """Start a worker; `env` adds to its environment."""
        return self._processes.start_worker(APP, env=self.env | options.pop("env", {}), **options)

    def start_beat(self, **options: Any) -> Process:
        """Start a beat."""
        return self._processes.start_beat(APP, env=self.env, **options)

    def listens(self) -> None:
        """Wait until a worker takes remote control; with gevent that comes after it is ready for tasks."""
        wait_until(lambda: self.app.control.ping(timeout=1.0, limit=1), timeout=20, message="a worker to answer")

    def open(self, gate: str) -> None:
        """Let the jobs pass that wait at a gate."""
        open_gate(self._gates, gate)

    def hold(self, gate: str, numbers: list[int] | None = None, task: str = "outage.hold", **options: Any) -> Job:
        """Make a job that waits at a gate, with numbers to be read."""
        job: Job = self.sidejob.enqueue(task, (gate,), **options)
        if numbers:
            job.input("numbers").write_many(numbers)
        return job

    def rows(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """Ask the store directly, on a connection of our own."""
        return [row._asdict() for row in self._eye.rows(query, *parameters)]

    @contextmanager
    def locked(self, job: Job) -> Iterator[Callable[[], bool]]:
        """Hold the lock on a job's row within the block; yields what tells whether somebody of ours waits for it."""
        with psycopg.connect(direct(self.database_url), options="-c search_path=sidejob") as connection:
            connection.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", [job.id])
            pid = connection.info.backend_pid

            def waiting() -> bool:
                return bool(self.rows("SELECT 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))", pid))

            yield waiting
            connection.rollback()

    def job_row(self, job: Job) -> dict[str, Any]:
        """Return a job's own row."""
        return self.rows("SELECT * FROM jobs WHERE id = %s", job.id)[0]

    def wait_for(self, job: Job, status: str, timeout: float = 20.0) -> dict[str, Any]:
        """Return a job's row once it has this status and no run is in progress."""

        def there() -> dict[str, Any] | None:
            row = self.job_row(job)
            if row["status"] != status or row["unit_no"] is not None:
                raise LookupError(f"it is {row}")
            return row

        return self.wait(there, timeout, f"job {job.id} to be {status}")

    def wait_for_count(self, status: str, count: int, timeout: float = 30.0) -> None:
        """Return once so many jobs have this status."""

        def enough() -> bool:
            found = {row["status"]: row["n"] for row in self.rows("SELECT status, count(*) n FROM jobs GROUP BY 1")}
            if found.get(status, 0) != count:
                raise LookupError(f"there are {found}")
            return True

        self.wait(enough, timeout, f"{count} jobs to be {status}", interval=0.1)

    def wait(self, predicate: Callable[[], T | None], timeout: float, message: str, **options: float) -> T:
        """Wait for a fact; when it does not come, have all processes write down where they stand."""
        try:
            return wait_until(predicate, timeout=timeout, message=message, **options)
        except TimeoutError:
            self._have_processes_dump_their_stacks()
            raise

    def wait_for_end(self, worker: WorkerProcess) -> int:
        """Return a worker's exit code once it has ended; Celery's own warm stop takes half a minute now and then."""
        try:
            return worker.wait(STOP_S)
        except TimeoutError:
            self._have_processes_dump_their_stacks()
            raise

    def _have_processes_dump_their_stacks(self) -> None:
        for pid in [pid for process in self._processes.started for pid in process.group()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)

    def nothing_lost(self) -> None:
        """Check that no job was buried or counts a loss."""
        assert self.rows("SELECT id, status, losses, error FROM jobs WHERE losses > 0") == []
        assert self.rows("SELECT job_id, reason, error FROM dead") == []

    def quiet(self) -> None:
        """Check that nothing rests in a state in which it would wait for nobody."""
        assert broken_rules(self) == []

    def close(self) -> None:
        """Close our client's connections."""
        self._eye.close()
        self.sidejob.close()
        self.app.close()


def broken_rules(site: Site) -> list[dict[str, Any]]:
    """Return what breaks the rules between rows that no CHECK can hold."""
    return site.rows("""
        SELECT j.id, j.status, j.unit_no, m.for_run, m.locked_by, 'held without its message' AS rule
        FROM jobs j LEFT JOIN messages m ON m.job_id = j.id
        WHERE j.unit_no IS NOT NULL AND (m.locked_by IS NULL OR m.locked_by <> j.worker_id)
        UNION ALL
        SELECT j.id, j.status, j.unit_no, m.for_run, m.locked_by, 'queued with nothing pending'
        FROM jobs j LEFT JOIN messages m ON m.job_id = j.id
        WHERE j.status = 'queued' AND m.job_id IS NULL AND NOT EXISTS (SELECT FROM timers t WHERE t.job_id = j.id)
        UNION ALL
        SELECT j.id, j.status, j.unit_no, m.for_run, m.locked_by, 'at rest with a message'
        FROM jobs j JOIN messages m ON m.job_id = j.id
        WHERE j.status IN ('suspended', 'completed', 'failed', 'terminated')
        UNION ALL
        SELECT j.id, j.status, j.unit_no, m.for_run, m.locked_by, 'a message of another run'
        FROM jobs j JOIN messages m ON m.job_id = j.id WHERE j.unit_no IS NULL AND m.for_run <> j.run_no + 1""")


@contextmanager
def site_of(directory: Path, processes: Processes, record: Record, **configuration: Any) -> Iterator[Site]:
    """A site within the block."""
    site = Site(directory, processes, record, **configuration)
    try:
        yield site
    finally:
        site.close()


@pytest.fixture(name="site")
def site_fixture(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker
) -> Iterator[Site]:
    """A site on this run's servers, with results in its Redis."""
    with site_of(tmp_path, processes, record, **broker.configuration, sidejob_database_url=database_url) as made:
        yield made
        made.quiet()

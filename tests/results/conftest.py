"""What tests of `result_backend = "sidejobpg://"` are given: apps and workers with all in one Postgres."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import kombu
import psycopg
import pytest
from celery import Celery

from celery_sidejob.results.place import APPLICATION
from tests.tools.apps import make_app
from tests.tools.brokers import in_postgres
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.workers import Processes, WorkerProcess

Make = Callable[..., Celery]


class Rows:
    """Looks into the table of results, and at the sessions that listen."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, options="-c search_path=sidejob")

    def all(self, statement: str, *parameters: Any) -> list[Any]:
        """All rows."""
        return self._connection.execute(statement, parameters).fetchall()

    def run(self, statement: str, *parameters: Any) -> None:
        """Run a statement that returns nothing."""
        self._connection.execute(statement, parameters)

    @property
    def keys(self) -> list[str]:
        """The keys of all rows, expired or not."""
        return [key for (key,) in self.all("SELECT key FROM results ORDER BY key")]

    @property
    def listening(self) -> int:
        """How many sessions listen for results."""
        (row,) = self.all(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()",
            APPLICATION,
        )
        return int(row[0])

    def end_listening(self) -> None:
        """End the sessions that listen."""
        self.run(
            """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE application_name = %s AND datname = current_database()""",
            APPLICATION,
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    """The results, as Postgres sees them."""
    looking = Rows(direct(database_url))
    yield looking
    looking.close()


@pytest.fixture
def url(database_url: str) -> str:
    """The URL of broker and results."""
    return in_postgres(database_url)


@pytest.fixture
def make(url: str) -> Iterator[Make]:
    """Makes plain apps that have these settings."""
    with ExitStack() as stack:

        def made(**settings: Any) -> Celery:
            app = stack.enter_context(Celery("client", broker=url, backend=url, set_as_current=False))
            app.conf.update(settings)
            return app

        yield made


@pytest.fixture
def app(make: Make) -> Celery:
    """A plain client."""
    return make()


@pytest.fixture
def start(processes: Processes, url: str, record: Record) -> Callable[..., WorkerProcess]:
    """Starts a worker of `results_app` with a pool; `settings` are its Celery settings."""

    def started(pool: str = "prefork", *, settings: dict[str, Any] | None = None, **options: Any) -> WorkerProcess:
        env = {"BROKER_URL": url, "SETTINGS": json.dumps(settings or {}), "C_FORCE_ROOT": "1", **record.env}
        return processes.start_worker(
            "tests.results.results_app", env=env, pool=pool, **{"concurrency": 2, **options}
        )  # fmt: skip

    return started


def _elsewhere(job: Any, *args: Any) -> None:
    """The client knows the names; bodies are the worker's."""


class Site:
    """A store that is broker and result backend, its client, and workers."""

    def __init__(self, database_url: str, broker_url: str, record: Record, processes: Processes) -> None:
        self.record, self._processes = record, processes
        self.app: Celery = make_app(
            "chords", broker=broker_url, result_backend="sidejobpg://", sidejob_database_url=database_url,
            sidejob_durable_tasks=["durable.*"],
        )  # fmt: skip
        for name in ("job.part", "job.total", "job.odd"):
            self.app.sidejob.task(_elsewhere, name=name)  # type: ignore[attr-defined]
        self._env = {"BROKER_URL": broker_url, "DATABASE_URL": database_url, "C_FORCE_ROOT": "1", **record.env}

    def start(self, pool: str = "prefork", **options: Any) -> WorkerProcess:
        """Start a worker; upper-case options are variables."""
        env = {name: options.pop(name) for name in list(options) if name.isupper()}
        return self._processes.start_worker(
            "tests.results.chords_app", env={**self._env, **env}, pool=pool, **{"concurrency": 1, **options}
        )

    def sig(self, task: str, *args: Any) -> Any:
        """A signature of a task."""
        return self.app.signature(task, args=args, app=self.app)

    def bodies(self) -> list[Any]:
        """What bodies were called with."""
        return [note["numbers"] for note in self.record.of("body")]

    def close(self) -> None:
        """Close the client."""
        self.app.sidejob.close()  # type: ignore[attr-defined]
        self.app.close()


@pytest.fixture
def site(database_url: str, record: Record, processes: Processes) -> Iterator[Site]:
    """All in one Postgres."""
    if kombu.VERSION[:2] < (5, 7):
        pytest.skip("sidejobpg:// needs kombu 5.7")
    made = Site(database_url, in_postgres(database_url), record, processes)
    yield made
    made.close()

"""A Postgres that counts statements, workers on its broker, and a sender."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from kombu import Connection

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from tests.tools.brokers import in_postgres
from tests.tools.fork_server import ForkServer
from tests.tools.guard import Guard
from tests.tools.workers import Processes, WorkerProcess, environment


class Stage:
    """Starts workers, sends, and reads what was noted."""

    def __init__(self, postgres: embedded.Postgres, processes: Processes, directory: Path) -> None:
        self.postgres = postgres
        self.processes = processes
        self.looking = psycopg.connect(postgres.url, autocommit=True)
        self.connection = Connection(in_postgres(postgres.url))
        self._noted = directory / "noted"
        self._noted.touch()
        self._read_to = 0
        self.unnoted = 0
        """How many tasks were sent and not noted yet."""

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Stage]:
        """Open one with durable settings."""
        with (
            embedded.Postgres(durable=True) as postgres, tempfile.TemporaryDirectory() as name, Guard() as guard,
            ForkServer(environment({})) as fork_server,
        ):  # fmt: skip
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
            postgres.restart()
            upgrade(postgres.url)
            directory = Path(name)
            processes = Processes(directory / "processes", guard, fork_server)
            made = cls(postgres, processes, directory)
            made.looking.execute("CREATE EXTENSION pg_stat_statements")
            try:
                yield made
            finally:
                processes.kill_all()
                made.connection.close()
                made.looking.close()

    @property
    def env(self) -> dict[str, str]:
        """What a worker needs to know."""
        return {"BROKER_URL": in_postgres(self.postgres.url), "NOTED": str(self._noted)}

    def start(self, queue: str, *, pool: str = "solo", concurrency: int = 1) -> WorkerProcess:
        """Start a worker of a queue, and return when it is ready."""
        return self.processes.start_worker(
            "benchmarks.broker.tasks", env=self.env, pool=pool, concurrency=concurrency, queues=queue,
            ready_timeout=120,
        )  # fmt: skip

    def end_workers(self) -> None:
        """Kill all workers, and forget what they held."""
        for worker in list(self.processes.started):
            self.processes.end(worker)
        self.looking.execute("DELETE FROM sidejob.broker_consumers")
        self.looking.execute("DELETE FROM sidejob.broker_messages")

    def send(self, queue: str, count: int) -> None:
        """Send so many tasks to a queue by one COPY."""
        with self.connection.Producer() as producer, producer.batch(max_size=count):
            for number in range(count):
                headers = {"lang": "py", "task": "noted", "id": f"task-{number}"}
                producer.publish(((), {}, {}), routing_key=queue, headers=headers, serializer="json")
        self.unnoted += count

    def noted(self) -> list[tuple[int, float]]:
        """Return what was noted since the last call: the worker's session, and seconds since 1970."""
        with self._noted.open() as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._read_to += len(whole)
        found = [(int(worker), float(at)) for worker, at in (line.split() for line in whole.splitlines())]
        self.unnoted -= len(found)
        return found

    def one(self, statement: str) -> int:
        """Return the only value of a query."""
        row = self.looking.execute(statement).fetchone()
        assert row is not None
        return int(row[0])


def told(what: str, figure: object, bound: str, kept: bool) -> bool:
    """Print one figure beside its bound, and return whether that is kept."""
    print(f"{what:62} {figure!s:>28}   {bound}{'' if kept else ': MISSED'}", flush=True)
    return kept

"""A store, a broker and the workers of `durable_app`, as one test of durable tasks sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
import redis
from celery import Celery
from kombu import Connection

from tests.tools.apps import make_app
from tests.tools.brokers import Broker
from tests.tools.databases import SCHEMA, Eye
from tests.tools.pgbouncer import direct
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.acceptance.durable_app"
QUICK = {"SIDEJOB_LEASE": "4", "SIDEJOB_HEARTBEAT_INTERVAL": "1", "SIDEJOB_LOST_AFTER": "1"}
BRIEF_CLAIM = {"CHORD_CLAIM_S": "3"}
"""Of workers that die with the claim to a chord's body."""
TIMEOUT_S = 30.0


class Site:
    """A store, a broker, a record, a client that knows the tasks by name, and what starts workers."""

    def __init__(self, database_url: str, broker: Broker, record: Record, processes: Processes) -> None:
        self.database_url = database_url
        self.broker = broker
        self.broker_url = broker.url
        self.record = record
        self.processes = processes
        self.env = {"SIDEJOB_DATABASE_URL": database_url, **broker.env, **record.env, **QUICK}
        self._crashed = record.path.with_suffix(".crashed")
        self._eye = Eye(database_url)
        self._clients: list[Celery] = []
        self.app = self.client(sidejob_database_url=database_url)

    def client(self, **settings: Any) -> Celery:
        """An app with the extension, without the tasks."""
        app = make_app(
            "client",
            broker=None,
            **self.broker.configuration,
            task_default_queue="durable",
            sidejob_lost_after=1,
            sidejob_durable_tasks=[f"{APP}.*", "named.*", "celery.chord_unlock"],
            **settings,
        )
        self._clients.append(app)
        return app

    def close(self) -> None:
        """Close what the clients have open."""
        self._eye.close()
        for app in self._clients:
            if hasattr(app, "sidejob"):
                app.sidejob.close()
            app.close()

    def worker(self, **options: Any) -> WorkerProcess:
        """Start a worker; it is ready when this returns."""
        env = {**self.env, **options.pop("env", {})}
        return self.processes.start_worker(APP, env=env, **options)

    def worker_with_a_crash(
        self, point: str, action: str = "kill", *, concurrency: int | None = None, **env: str
    ) -> WorkerProcess:
        """Start a worker in which something befalls the first process, of all such workers, that reaches a point."""
        crash = {"SIDEJOB_CRASH_POINTS": f"{point}={action}", "SIDEJOB_CRASH_ONCE": str(self._crashed)}
        options = {} if concurrency is None else {"concurrency": concurrency}
        return self.worker(env={**crash, **env}, **options)

    def wait_for_crash(self) -> None:
        """Wait until a process has reached that point."""
        wait_until(self._crashed.exists, timeout=TIMEOUT_S, message="the crash point to be reached")

    def outlive(self, worker: WorkerProcess) -> None:
        """Have somebody go on after a process died: where bodies run in the worker's own, that was the worker."""
        if self.processes.pool == "prefork":
            assert worker.alive
        else:
            worker.wait(TIMEOUT_S)
            self.worker()

    def s(self, task: str, *args: Any, **options: Any) -> Any:
        """A signature of one of the tasks."""
        name = task if "." in task else f"{APP}.{task}"
        return self.app.signature(name, args=args, **options)

    def call(self, task: str, *args: Any, **options: Any) -> Any:
        """Call one of the tasks."""
        return self.s(task, *args).apply_async(**options)

    def rows(self) -> list[Any]:
        """The messages that are kept."""
        return self.sql(
            "SELECT task_id, task, queue, generation, published_at FROM messages WHERE body IS NOT NULL ORDER BY 1"
        )

    def dead(self) -> list[Any]:
        """The entries of the dead set."""
        return self.sql("SELECT * FROM dead ORDER BY id")

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        """Run SQL in our schema."""
        return self._eye.rows(statement, *parameters)

    @contextmanager
    def locked(self, result: Any) -> Iterator[None]:
        """Within the block somebody else has locked the row of a task, and whoever wants to change it waits."""
        with psycopg.connect(direct(self.database_url), options=f"-c search_path={SCHEMA}") as connection:
            connection.execute("SELECT FROM messages WHERE task_id = %s FOR UPDATE", [result.id])
            yield

    def ran(self, result: Any, event: str = "ran", **data: Any) -> list[dict[str, Any]]:
        """The runs of a task."""
        return self.record.of(event, id=result.id, **data)

    def holding(self, result: Any, count: int = 1) -> dict[str, Any]:
        """The last of the `count` runs of a task that hold on."""
        return self.record.wait_for("holding", count=count, timeout=TIMEOUT_S, id=result.id)[-1]

    def go(self, *results: Any) -> None:
        """Let tasks that hold on go on."""
        for result in results:
            self.record.note("go", id=result.id)

    def wait_quiet(self) -> None:
        """Wait until no message is kept any more."""
        wait_until(lambda: not self.sql("SELECT 1 FROM messages"), timeout=TIMEOUT_S, message="no message to be left")

    def queued(self) -> int:
        """How many messages wait in the broker."""
        if self.broker.is_redis:
            with redis.Redis.from_url(self.broker.redis_url) as client:
                return int(client.llen("durable"))
        if self.broker.is_store:  # where nobody need have declared a queue
            waiting = "queue = 'durable' AND due_at IS NULL AND holder IS NULL"
            return int(self.sql(f"SELECT count(*) FROM broker_messages WHERE {waiting}")[0].count)
        with Connection(self.broker_url) as connection, suppress(connection.channel_errors):
            return int(connection.default_channel.queue_declare("durable", passive=True).message_count)
        return 0

    def empty_broker(self) -> None:
        """Empty the broker, and whatever else there is in that Redis."""
        if self.broker.is_redis:
            with redis.Redis.from_url(self.broker.redis_url) as client:
                client.flushdb()
            return
        with Connection(self.broker_url) as connection:
            connection.default_channel.queue_delete("durable")


SEVERAL = pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
PROCESSES = pytest.mark.pools("prefork", reason="a process of the pool is killed")


@pytest.fixture(name="site")
def site_fixture(database_url: str, broker: Broker, record: Record, processes: Processes) -> Iterator[Site]:
    """A store, a broker and a record of this test's own, and what starts workers on them."""
    made = Site(database_url, broker, record, processes)
    yield made
    made.close()

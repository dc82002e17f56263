"""A scene: a store, a broker, a record, workers that share them, and a client in the test's own process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from celery_sidejob import Job
from tests.acceptance import checker
from tests.tools.apps import make_app
from tests.tools.brokers import Broker
from tests.tools.databases import Eye
from tests.tools.recorder import Record
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.acceptance.jobs"
LEDGER = """
CREATE TABLE public.ledger (id bigint GENERATED ALWAYS AS IDENTITY, job bigint, run bigint, what text, value bigint)"""
QUICK = {
    "SIDEJOB_LEASE": "6",
    "SIDEJOB_HEARTBEAT_INTERVAL": "1",
    "SIDEJOB_LOST_AFTER": "2",
    "SIDEJOB_MAX_LOSSES": "100",
}
"""Shorter times than the defaults, and no giving up, where many deaths are wanted."""


class Scene:
    """Starts workers on a store, a broker and a record of its own, and asks things of them as a client does."""

    def __init__(self, database_url: str, broker: Broker | str, record: Record, processes: Processes) -> None:
        self.database_url = database_url
        self.broker = Broker.of(broker)
        self.broker_url = self.broker.url
        self.record = record
        self.processes = processes
        self.env = {"SIDEJOB_DATABASE_URL": database_url, **self.broker.env, **record.env}
        self.app = make_app(
            "acceptance",
            broker=None,
            **self.broker.configuration,
            sidejob_database_url=database_url,
            sidejob_lost_after=2,
            sidejob_durable_tasks=["acceptance.*_task"],  # or a call would be Celery's until a worker has received it
            task_default_queue="acceptance",
        )
        self.sidejob = self.app.sidejob
        self._engine = create_engine(
            database_url.replace("postgresql://", "postgresql+psycopg://"),
            poolclass=NullPool,
            connect_args={"prepare_threshold": None},
        )
        self.eye = Eye(database_url)
        self.sql(LEDGER)

    def close(self) -> None:
        """Close what the client has open."""
        self.eye.close()
        self.sidejob.close()
        self.app.close()

    def worker(
        self, *, pool: str | None = None, concurrency: int = 1, queues: str | None = None, name: str | None = None,
        **env: str,
    ) -> WorkerProcess:  # fmt: skip
        """Start a worker, with further variables; it is ready when this returns."""
        return self.processes.start_worker(
            APP, env={**self.env, **env}, pool=pool, concurrency=concurrency, queues=queues, name=name
        )

    def ledger(self) -> list[tuple[int, int, str, int]]:
        """What was entered, (job, run, what, value), in order."""
        return self.sql("SELECT job, run, what, value FROM public.ledger ORDER BY id")

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        """Run SQL in the schema of sidejob and return the rows."""
        return self.eye.rows(statement, *parameters)

    def row(self, job: Job) -> Any:
        """The job's row."""
        return self.sql("SELECT * FROM jobs WHERE id = %s", job.id)[0]

    def losses_at_death(self, *jobs: Job) -> list[int]:
        """How many losses the death of all workers counts for each of these jobs, whose runs have committed no unit.

        One, if the process of a run has claimed it. Of a run that was claimed in a page nobody knows whether it had
        begun.
        """
        begun = {row.job_id for row in self.sql("SELECT job_id FROM messages WHERE locked_pid IS NOT NULL")}
        return [int(job.id in begun) for job in jobs]

    def sweeper(self) -> int | None:
        """The process id of the worker that sweeps."""
        rows = self.sql(
            "SELECT w.ident FROM leases l JOIN workers w ON w.id = l.holder"
            " WHERE l.name = 'sweeper' AND w.dead_at IS NULL"
        )
        return int(rows[0].ident.split(":")[1]) if rows else None

    def go(self, *jobs: Job) -> None:
        """Let the bodies of these jobs that hold on go on."""
        for job in jobs:
            self.record.note("go", job=job.id)

    def settle(self, timeout: float) -> None:
        """Wait until everything is quiet, and judge the store."""
        checker.wait_quiet(self.eye, timeout)
        assert checker.violations(self.eye, at_rest=True) == []

    def enqueue(self, task: str, args: Sequence[Any] = (), **options: Any) -> Job:
        """Make a job of one of the tasks of `jobs`."""
        return self.sidejob.enqueue(f"acceptance.{task}", args, **options)

    def hold(self, *values: int, task: str = "holder", **options: Any) -> Job:
        """Make a job with packets to read (1): in one transaction, since a worker may begin before a second call."""
        with self._engine.begin() as connection:
            job = self.enqueue(task, transaction=connection, **options)
            job.input("in").write_many(values or [1], transaction=connection)
        return job


CHILDREN, PAIRS, STEPS = 2, 3, 4


@dataclass
class Workload:
    """One of everything, and what must have come of it, whatever died meanwhile."""

    scene: Scene
    family: Job
    stepper: Job
    patient: Job
    borrowed: Job

    @classmethod
    def start(cls, scene: Scene) -> Workload:
        """Ask for everything; the client of this process survives."""
        link = scene.app.signature("acceptance.linked")
        family = scene.enqueue("family", (CHILDREN, PAIRS), link=link)
        stepper = scene.enqueue("stepper", (STEPS,))
        patient = scene.enqueue("patient")
        with psycopg.connect(scene.database_url, prepare_threshold=None) as connection:
            borrowed = scene.enqueue("adder", transaction=connection)
            connection.commit()
            borrowed.input("a").write(7, transaction=connection)
            borrowed.input("b").write(8, transaction=connection)
            connection.commit()
        return cls(scene, family, stepper, patient, borrowed)

    def judge(self, *, beside: Job | None = None) -> None:
        """Compare with what there must be now that everything is quiet, but for what a job `beside` it has entered."""
        total = sum(child * 1000 + pair for child in range(CHILDREN) for pair in range(PAIRS))
        entries = Counter(
            (what, value) for of, _, what, value in self.scene.ledger() if beside is None or of != beside.id
        )
        sums = [child * 1000 + pair for child in range(CHILDREN) for pair in range(PAIRS)]
        wanted = Counter({("sum", value): 1 for value in sums})
        wanted.update({("collected", value): 1 for value in sums})
        wanted.update({("shutdown", 0): CHILDREN, ("linked", total): 1, ("patient", 1): 1, ("sum", 15): 1})
        assert entries == wanted, {"too many": entries - wanted, "too few": wanted - entries}

        statuses = {job.id: str(job.refresh().status) for job in self._jobs()}
        assert set(statuses.values()) == {"completed"}, statuses
        children = self.scene.sidejob.jobs(parent=self.family)
        assert [str(child.status) for child in children] == ["terminated"] * CHILDREN
        assert [child.get("starts") for child in children] == [1] * CHILDREN
        assert [packet.value for packet in self.stepper.output("steps").peek()] == list(range(STEPS))
        assert [packet.value for packet in self.borrowed.output("sum").peek()] == [15]
        assert len(self.scene.sidejob.dead) == 0

    def _jobs(self) -> list[Job]:
        return [self.family, self.stepper, self.patient, self.borrowed]

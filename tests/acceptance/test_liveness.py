"""How the death of a worker is noticed: its lock falls, or it is silent though the lock is held, or it has no lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from celery_sidejob import Job
from tests.acceptance.scene import Scene
from tests.tools.databases import Databases
from tests.tools.pgbouncer import PgBouncer
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

NEVER = {"SIDEJOB_LEASE": "600"}
"""A lease in which silence says nothing within a test."""
SOON = {"SIDEJOB_LEASE": "4", "SIDEJOB_HEARTBEAT_INTERVAL": "1", "SIDEJOB_LOST_AFTER": "2"}
NO_GRACE_NEEDED = {"SIDEJOB_LOCK_GRACE": "600"}
"""With it a lock that is free says nothing within a test."""


@pytest.fixture
def lockless_scene(
    databases: Databases, database_template: str, pgbouncer: PgBouncer, redis_url: str, record: Record,
    processes: Processes,
) -> Iterator[Scene]:  # fmt: skip
    """A scene whose workers reach their store through a PgBouncer alone, without `sidejob_direct_url`."""
    with databases.fresh(template=database_template) as name:
        made = Scene(pgbouncer.url_of(databases.url_of(name)), redis_url, record, processes)
        yield made
        made.close()


class Deaths:
    """What the store tells of workers, looked at again and again: who was suspected for what, and who is dead."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._holders = [row.pid for row in scene.sql("SELECT pid FROM pg_locks WHERE locktype = 'advisory'")]
        """The workers' own sessions; who sweeps takes a lock that has fallen too, to see that it has."""
        self.suspected: dict[int, set[str]] = {}
        self.locks: dict[int, set[bool]] = {}

    def worker_of(self, job: Job) -> int:
        """Who runs the job."""
        worker_id: int = self._scene.row(job).worker_id
        return worker_id

    def wait_for(self, worker_id: int, timeout: float) -> None:
        """Return once the worker was declared dead, or is forgotten already."""

        def dead() -> bool:
            rows = self._scene.sql(
                """
                SELECT w.id, w.suspect_by, w.dead_at, EXISTS (
                  SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.pid = ANY(%s)
                    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                    AND l.objid::bigint = (hashtext('sidejob') # w.id::int)::bigint & 4294967295) AS locked
                FROM workers w""",
                self._holders,
            )
            for row in rows:
                if row.suspect_by:
                    self.suspected.setdefault(row.id, set()).add(row.suspect_by)
                    self.locks.setdefault(row.id, set()).add(row.locked)
            return all(row.id != worker_id or row.dead_at is not None for row in rows)

        wait_until(dead, timeout=timeout, interval=0.01, message=f"worker {worker_id} to be declared dead")


def holding(scene: Scene) -> Job:
    """A job that runs and holds on."""
    job = scene.hold()
    scene.record.wait_for("holding", job=job.id, timeout=15)
    return job


def runs_again(scene: Scene, job: Job) -> None:
    """The job begins once more, elsewhere, and its packet is read by one committed unit."""
    scene.record.wait_for("holding", count=2, job=job.id, timeout=15)
    scene.go(job)
    scene.settle(20)
    assert [(what, read) for of, _, what, read in scene.ledger() if of == job.id] == [("held", 1)]


def test_a_lock_that_fell_tells_though_nobody_would_miss_the_beat(scene: Scene) -> None:
    first = scene.worker(**NEVER)
    job = holding(scene)
    scene.worker(**NEVER)
    deaths = Deaths(scene)
    worker_id = deaths.worker_of(job)

    first.kill_group()

    deaths.wait_for(worker_id, timeout=30)
    assert deaths.suspected[worker_id] == {"lock"}
    assert deaths.locks[worker_id] == {False}
    runs_again(scene, job)


def test_silence_tells_though_the_lock_is_held(scene: Scene) -> None:
    frozen = scene.worker(**SOON, **NO_GRACE_NEEDED)
    job = holding(scene)
    scene.worker(**SOON, **NO_GRACE_NEEDED)
    deaths = Deaths(scene)
    worker_id = deaths.worker_of(job)

    frozen.stop_signal()

    deaths.wait_for(worker_id, timeout=30)
    assert deaths.suspected[worker_id] == {"silence"}
    assert deaths.locks[worker_id] == {True}
    scene.record.wait_for("holding", count=2, job=job.id, timeout=15)
    frozen.cont()
    frozen.wait_for_log("was declared dead while it was silent")
    scene.go(job)
    scene.settle(20)
    assert [(what, read) for of, _, what, read in scene.ledger() if of == job.id] == [("held", 1)]


def test_silence_tells_where_there_is_no_lock(lockless_scene: Scene) -> None:
    scene = lockless_scene
    first = scene.worker(**SOON)
    job = holding(scene)
    scene.worker(**SOON)
    deaths = Deaths(scene)
    worker_id = deaths.worker_of(job)
    first.wait_for_log("No liveness lock: sidejob_database_url leads through a pooling proxy; set sidejob_direct_url")
    assert {row.locked for row in scene.sql("SELECT locked FROM workers")} == {False}

    first.kill_group()

    deaths.wait_for(worker_id, timeout=30)
    assert deaths.suspected[worker_id] == {"silence"}
    assert deaths.locks[worker_id] == {False}
    runs_again(scene, job)


# -- who sweeps ----------------------------------------------------------------------------------------------------


def kill(worker: WorkerProcess) -> None:
    worker.kill_group()


def freeze(worker: WorkerProcess) -> None:
    worker.stop_signal()


@pytest.mark.parametrize("end", [kill, freeze])
@pytest.mark.parametrize("kind", ["scene", "lockless_scene"])
def test_a_sweeper_that_is_gone_is_followed(
    request: pytest.FixtureRequest, kind: str, end: Callable[[WorkerProcess], Any]
) -> None:
    """Long before its lease ends as a worker, and whatever tells of its death as one."""
    scene: Scene = request.getfixturevalue(kind)
    workers = {worker.pid: worker for worker in (scene.worker(pool="solo", **NEVER) for _ in range(2))}
    sweeper = wait_until(scene.sweeper, message="one to sweep")

    end(workers[sweeper])

    follower = wait_until(
        lambda: (scene.sweeper() not in (None, sweeper)) and scene.sweeper(), timeout=15, message="the other to sweep"
    )
    assert follower in workers
    job = scene.enqueue("adder")
    scene.sidejob.runtime.connections.write_behind_now()
    scene.sql("UPDATE messages SET published_at = NULL, next_check_at = now()")  # what only a sweeper finds
    job.wait("completed", timeout=15)


@pytest.mark.pools("prefork", reason="the process that stops in its run is the worker's own")
def test_a_run_frozen_before_the_commit_of_its_block_is_rescued(scene: Scene, tmp_path: Path) -> None:
    """It has locked its job through the body's own connection, which ends with its worker."""
    frozen = tmp_path / "frozen"
    scene.worker(pool="solo", SIDEJOB_CRASH_POINTS="unit:before-commit=stop", SIDEJOB_CRASH_ONCE=str(frozen), **SOON)
    with psycopg.connect(scene.database_url) as connection:  # or a worker may run the job before its packets are there
        job = scene.enqueue("adder", transaction=connection)
        job.input("a").write(1, transaction=connection)
        job.input("b").write(2, transaction=connection)
    wait_until(frozen.exists, timeout=30, message="the run to stop before its commit")
    scene.worker(**SOON)
    job.wait("completed", timeout=40)
    assert scene.ledger() == [(job.id, 2, "sum", 3)]

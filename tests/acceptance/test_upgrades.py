"""Whose a schema is, who may use it, and how it is upgraded and its workers are replaced while they work."""

from __future__ import annotations

import itertools
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

from celery_sidejob.hooks.messages import doorbell
from celery_sidejob.store.meta import REVISION
from celery_sidejob.store.schema import migrate
from tests.acceptance.scene import APP, QUICK, Scene, Workload
from tests.tools.brokers import APART, Broker
from tests.tools.migrations import FURTHER, add_migration, copied
from tests.tools.pgbouncer import direct
from tests.tools.roles import a_role
from tests.tools.workers import Process, WorkerProcess

NEWER = "tests.acceptance.newer_jobs"
OTHER = "tests.acceptance.other_app"


def command(scene: Scene, *words: str, app: str = APP, **env: str) -> Process:
    """Run `celery -A app sidejob …` to its end."""
    argv = [sys.executable, "-m", "celery", "-A", app, "sidejob", *words]
    process = scene.processes.start(argv, env={**scene.env, **env}, name="-".join(words[:2]))
    process.wait(30)
    return process


# -- whose it is -----------------------------------------------------------------------------------------------------


def does_not_start(scene: Scene, app: str = APP, **env: str) -> str:
    """Start a worker that ends by itself before it is ready, and return what it said."""
    with pytest.raises(AssertionError, match="before it wrote"):
        scene.processes.start_worker(app, env={**scene.env, **env}, pool="solo")
    refused = scene.processes.started[-1]
    assert refused.wait(10) != 0
    said = refused.log()
    assert (said.count("This worker cannot start: "), "Traceback" in said) == (1, False), said
    return said


def test_a_worker_of_another_app_does_not_start(scene: Scene) -> None:
    assert command(scene, "db", "upgrade").wait() == 0

    said = does_not_start(scene, app=OTHER)

    assert "Schema 'sidejob' belongs to the app 'acceptance', but here is the app 'other'" in said
    assert "set sidejob_schema to another name" in said
    assert "celery -A <app> sidejob db reassign" in said
    assert scene.sql("SELECT id FROM workers") == []
    scene.worker(pool="solo")  # the rightful one does


@pytest.mark.slow
def test_a_worker_of_another_broker_starts_once_the_schema_was_given_to_it(scene: Scene, other_broker: Broker) -> None:
    assert command(scene, "db", "upgrade").wait() == 0
    first = scene.worker(pool="solo")
    before, moved = scene.sidejob.owner["broker"], {"BROKER_URL": other_broker.url}
    waiting = scene.enqueue("adder", queue="later")

    said = does_not_start(scene, **moved)

    assert f"belongs to the broker {before!r}, but here is the broker" in said
    refused = command(scene, "db", "reassign", **moved)
    assert (refused.wait(), "has workers that run" in refused.log()) == (1, True)
    first.terminate()
    assert first.wait(30) == 0
    given = command(scene, "db", "reassign", **moved)
    assert given.wait() == 0, given.log()
    assert f"before: the app 'acceptance' and the broker {before!r}" in given.log()
    scene.worker(pool="solo", queues="acceptance,later", **moved)
    waiting.wait("completed", timeout=20)  # its doorbell was in the other broker
    assert "belongs to the broker" in does_not_start(scene)


@pytest.mark.slow
def test_commands_for_an_init_container(scene: Scene, empty_database_url: str) -> None:
    """0: workers can start; 3: try again; 4: an upgrade is wanted; 1: a person must look."""
    assert command(scene, "db", "upgrade").wait() == 0
    empty = {"SIDEJOB_DATABASE_URL": empty_database_url, "SIDEJOB_DIRECT_URL": direct(empty_database_url)}
    away = {"SIDEJOB_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x", "SIDEJOB_DIRECT_URL": ""}

    codes = [command(scene, "db", "check", **env).wait() for env in ({}, away, empty)]
    assert [*codes, command(scene, "db", "check", app=OTHER).wait()] == [0, 3, 4, 1]


# -- who may use it --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_time_scene(scene: Scene) -> Iterator[Scene]:
    """A scene whose workers and clients have the documented GRANTs, and may change nothing else."""
    with a_role(direct(scene.database_url)) as (role, url):
        printed = command(scene, "db", "grants", role)
        with psycopg.connect(direct(scene.database_url), autocommit=True) as owner:
            owner.execute("".join(line for line in printed.log().splitlines(True) if line.startswith("GRANT")))
            owner.execute("ALTER TABLE ledger SET SCHEMA public")  # the user's own table is not among ours
            owner.execute(f"GRANT SELECT, INSERT ON ledger TO {role}")
        scene.env.update(SIDEJOB_DATABASE_URL=url, SIDEJOB_DIRECT_URL="")  # a proxy of ours would make it its own user
        yield scene
        for process in scene.processes.started:
            process.kill_group()


def test_the_run_time_role_runs_the_workload(run_time_scene: Scene) -> None:
    scene = run_time_scene
    scene.worker(concurrency=2, **QUICK)
    workload = Workload.start(scene)
    scene.settle(30)
    workload.judge()
    role = "SELECT DISTINCT usename FROM pg_stat_activity WHERE application_name = 'celery_sidejob'"
    assert any(row.usename.startswith("sidejob_test_") for row in scene.sql(role))


def test_a_right_that_is_missing_stops_a_worker_at_its_start(run_time_scene: Scene) -> None:
    scene = run_time_scene
    role = scene.env["SIDEJOB_DATABASE_URL"].partition("://")[2].partition(":")[0]
    scene.sql(f"REVOKE INSERT ON packets FROM {role}")

    said = does_not_start(scene)

    assert "lacks rights in schema 'sidejob': INSERT on packets" in said


# -- upgrades under way ----------------------------------------------------------------------------------------------


def test_workers_of_neighbouring_revisions_work_side_by_side(scene: Scene, tmp_path: Path) -> None:
    """Code of each on the schema of each, and under all of them the schema goes from one to the other."""

    def worker(app: str) -> WorkerProcess:
        return scene.processes.start_worker(app, env={**scene.env, **QUICK}, concurrency=1)

    before = [worker(APP), worker(NEWER)]
    workload = Workload.start(scene)
    scene.record.wait_for("adder", timeout=20)

    with copied(tmp_path) as scripts:
        add_migration(scripts)
        assert migrate.upgrade(scene.database_url) == FURTHER

    after = [worker(APP), worker(NEWER)]
    told = [row.revision for row in scene.sql("SELECT revision FROM workers ORDER BY id")]
    assert told == [REVISION, FURTHER, REVISION, FURTHER]
    scene.settle(40)
    workload.judge()
    for gone in before:
        gone.kill_group()
    again = Workload.start(scene)  # the sweeper of the first half is perhaps gone, and what it held is rescued
    scene.settle(40)
    entries = [(what, value) for _, _, what, value in scene.ledger()]
    assert entries.count(("patient", 1)) == 2
    assert {str(job.refresh().status) for job in again._jobs()} == {"completed"}
    assert all(process.alive for process in after)


@pytest.mark.brokers("redis", only=APART, reason="is the store: a worker makes the message itself, of the row")
def test_a_message_of_a_newer_version_is_left_alone_and_comes_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = scene.worker(concurrency=1, **QUICK)
    with monkeypatch.context() as newer:
        newer.setattr(doorbell, "FORMAT", 2)
        job = scene.enqueue("adder")
    job.input("a").write(1)
    job.input("b").write(2)

    worker.wait_for_log("A message for a job is of format 2, which this version does not read")
    scene.settle(20)  # the sweeper rings in its own words
    assert scene.row(job).run_no == 1
    assert [entry[2:] for entry in scene.ledger()] == [("sum", 3)]
    assert scene.row(job).losses == 0


# -- deploys ---------------------------------------------------------------------------------------------------------

PAIRS = 4


def left_out(wanted: list[tuple[int, int]], entered: list[tuple[int, int]]) -> list[int]:
    """The jobs of which not everything was entered, or not once."""
    return sorted({job for job, _ in (Counter(wanted) - Counter(entered)) + (Counter(entered) - Counter(wanted))})


@pytest.mark.slow
def test_a_rolling_deploy_under_load_loses_nothing_doubles_nothing_and_counts_no_losses(scene: Scene) -> None:
    """Four workers are replaced one by one, some politely and some not, while jobs come in all the time."""
    workers = [scene.worker(concurrency=1, name=f"old{number}") for number in range(4)]
    deployed, numbers = Event(), itertools.count(1)
    workload = Workload.start(scene)

    def load() -> list[tuple[Any, int]]:
        made = []
        while not deployed.wait(0.1):
            number = next(numbers)
            job = scene.enqueue("adder")
            job.input("a").write_many([number * 1000 + pair for pair in range(PAIRS)])
            job.input("b").write_many([0] * PAIRS)
            made.append((job, number))
            scene.enqueue("stepper", (3,))
        return made

    with ThreadPoolExecutor(1) as client:
        loading = client.submit(load)
        try:
            for number, old in enumerate(workers):
                scene.worker(concurrency=1, name=f"new{number}")
                ran = len(scene.record.of("adder"))
                scene.record.wait_for("adder", count=ran + 3, timeout=60)  # it is in the middle of things
                old.send_signal(signal.SIGQUIT if number % 2 else signal.SIGTERM)
                old.wait(60)
        finally:
            deployed.set()
        made = loading.result(30)

    scene.settle(60)
    assert scene.sql("SELECT id, task, error FROM jobs WHERE status = 'failed'") == []
    ours = {job.id for job, _ in made}
    entered = sorted((job, value) for job, _, what, value in scene.ledger() if what == "sum" and job in ours)
    wanted = sorted((job.id, number * 1000 + pair) for job, number in made for pair in range(PAIRS))
    assert entered == wanted, scene.sql("SELECT * FROM jobs WHERE id = ANY(%s)", left_out(wanted, entered))
    assert len(made) > 20
    assert scene.sql("SELECT id, losses FROM jobs WHERE losses > 0") == []
    assert len(scene.sidejob.dead) == 0
    assert {str(job.refresh().status) for job in workload._jobs()} == {"completed"}
    for process in scene.processes.started:
        assert "was lost with its worker" not in process.log()

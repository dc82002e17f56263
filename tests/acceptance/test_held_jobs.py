"""Jobs whose runs a worker claims before they begin: nothing of them is lost, doubled or wrongly counted."""

from __future__ import annotations

import os
import random
import signal

import psycopg
import pytest

from celery_sidejob import Job
from tests.acceptance.scene import QUICK, Scene
from tests.tools.proxy import TcpProxy
from tests.tools.waiting import wait_until
from tests.tools.workers import WorkerProcess

CLAIMED = "SELECT job_id FROM messages WHERE locked_by IS NOT NULL AND locked_pid IS NULL ORDER BY job_id"
TIMEOUT_S = 60.0

pytestmark = pytest.mark.pools("prefork", reason="a process of the pool is killed, or gets no run")


def waiting(scene: Scene, number: int) -> list[Job]:
    """Make jobs that hold on in their runs."""
    return [scene.enqueue("waiter", (value,)) for value in range(number)]


def holding(scene: Scene, job: Job, count: int = 1) -> int:
    """Wait until the job is in the body of so many runs; returns the process of the last."""
    return int(scene.record.wait_for("holding", count=count, timeout=TIMEOUT_S, job=job.id)[-1]["pid"])


def idle(scene: Scene) -> int:
    """Return the process of the worker that has one, which has nothing to do."""
    [first] = waiting(scene, 1)
    process = holding(scene, first)
    scene.go(first)
    scene.settle(TIMEOUT_S)
    return process


def claimed(scene: Scene) -> list[int]:
    """The jobs that workers have claimed in pages."""
    return [row.job_id for row in scene.sql(CLAIMED)]


def losses(scene: Scene, *jobs: Job) -> list[int]:
    """How many runs of these jobs were lost in a row."""
    return [scene.row(job).losses for job in jobs]


def test_what_a_killed_worker_had_claimed_runs_elsewhere_and_counts_from_the_second_death_on(scene: Scene) -> None:
    """Nobody knows of the first whether the run had begun; then its process claims the run."""
    worker = scene.worker(concurrency=2, **QUICK)
    jobs = waiting(scene, 2)
    for deaths in range(3):
        for job in jobs:
            holding(scene, job, deaths + 1)
        assert claimed(scene) == ([job.id for job in jobs] if deaths == 0 else [])
        assert losses(scene, *jobs) == [max(0, deaths - 1)] * 2
        if deaths < 2:
            worker.kill_group()
            worker = scene.worker(concurrency=2, **QUICK)
    scene.go(*jobs)
    scene.settle(TIMEOUT_S)
    assert [(scene.row(job).status, scene.row(job).run_no) for job in jobs] == [("completed", 3)] * 2
    assert [len(scene.record.of("went", job=job.id)) for job in jobs] == [1, 1]


def test_a_killed_process_of_a_claimed_run_counts_at_once(scene: Scene) -> None:
    scene.worker(concurrency=2, **QUICK)
    killed, other = waiting(scene, 2)
    process = holding(scene, killed)
    holding(scene, other)
    assert claimed(scene) == [killed.id, other.id]
    os.kill(process, signal.SIGKILL)
    holding(scene, killed, 2)
    assert losses(scene, killed, other) == [1, 0]
    scene.go(killed, other)
    scene.settle(TIMEOUT_S)
    assert [len(scene.record.of("went", job=job.id)) for job in (killed, other)] == [1, 1]
    assert [one.what for one in killed.history if one.what in ("lost", "completed")] == ["lost", "completed"]


def test_a_transaction_that_has_locked_the_job_of_a_run_holds_up_no_other(scene: Scene) -> None:
    scene.worker(**QUICK)
    [locked] = waiting(scene, 1)
    holding(scene, locked)
    with psycopg.connect(scene.database_url) as connection:
        connection.execute("SELECT FROM sidejob.jobs WHERE id = %s FOR UPDATE", [locked.id])
        scene.go(locked)
        others = [scene.enqueue("timed", (number,)) for number in range(5)]
        for other in others:
            scene.record.wait_for("ended", job=other.id, timeout=TIMEOUT_S)
        assert scene.row(locked).status == "running"
    scene.settle(TIMEOUT_S)
    assert [len(scene.record.of("ended", job=job.id)) for job in others] == [1] * 5
    assert scene.row(locked).status == "completed"


def test_an_end_that_waits_for_a_transaction_holds_up_no_other_that_is_none_of_a_page(scene: Scene) -> None:
    scene.worker(concurrency=2, **QUICK)
    locked, asked = waiting(scene, 2)
    for job in (locked, asked):
        holding(scene, job)
    asked.run()
    with psycopg.connect(scene.database_url) as connection:
        connection.execute("SELECT FROM sidejob.jobs WHERE id = %s FOR UPDATE", [locked.id])
        scene.go(locked)
        scene.record.wait_for("went", job=locked.id, timeout=TIMEOUT_S)
        scene.go(asked)
        wait_until(lambda: scene.row(asked).status == "completed", timeout=TIMEOUT_S)
        assert scene.row(locked).status == "running"
    scene.settle(TIMEOUT_S)
    assert scene.row(locked).status == "completed"
    assert [len(scene.record.of("went", job=job.id)) for job in (locked, asked)] == [1, 2]


def test_a_job_that_is_asked_before_the_end_of_its_run_runs_again(scene: Scene) -> None:
    scene.worker(**QUICK)
    asked, terminated = waiting(scene, 2)
    for job in (asked, terminated):
        holding(scene, job)
        assert scene.row(job).unit_no == 0
        job.run() if job is asked else job.terminate()
        scene.go(job)
    scene.settle(TIMEOUT_S)
    assert len(scene.record.of("went", job=asked.id)) == 2
    assert [scene.row(job).status for job in (asked, terminated)] == ["completed", "terminated"]


@pytest.mark.few(0)
@pytest.mark.parametrize("task", ["once", "timed"])
def test_a_worker_that_was_frozen_begins_what_it_holds_without_effect(scene: Scene, task: str) -> None:
    """A process had the run, and had not begun it, when the whole worker was stopped for longer than its lease."""
    frozen = scene.worker(**QUICK)
    process = idle(scene)
    os.kill(process, signal.SIGSTOP)
    job = scene.enqueue(task, (1,))
    wait_until(lambda: claimed(scene) == [job.id], timeout=TIMEOUT_S, message="the run to be claimed")
    frozen.wait_for_answer(scene.app, TIMEOUT_S)  # a round of its loop: it was sent
    frozen.send_signal(signal.SIGSTOP)
    other = scene.worker(**QUICK)
    wait_until(lambda: scene.row(job).status == "completed", timeout=TIMEOUT_S)
    for pid in (frozen.pid, process):
        os.kill(pid, signal.SIGCONT)
    frozen.wait_for_log(f"Run 1 of job {job.id} is no longer its current run", TIMEOUT_S)
    other.terminate()
    assert other.wait(30) == 0

    later = scene.enqueue(task, (2,))
    scene.settle(TIMEOUT_S)
    assert [(scene.row(one).status, scene.row(one).run_no) for one in (job, later)] == [
        ("completed", 2),
        ("completed", 1),
    ]
    assert losses(scene, job, later) == [0, 0]
    assert [one.what for one in job.history] == ["made", "claimed", "given back", "claimed", "completed"]
    entered = [(of, run) for of, run, _, _ in scene.ledger()]
    assert entered == ([(job.id, 2), (later.id, 1)] if task == "once" else [])


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_workers_that_stop_leave_no_trace_of_what_they_had_not_begun(scene: Scene, pool: str) -> None:
    worker = scene.worker(pool=pool, concurrency=2, **QUICK)
    jobs = [scene.enqueue("timed", (number, 0.02)) for number in range(150)]
    for stops in range(3):
        scene.record.wait_for("ended", count=30 * (stops + 1), timeout=TIMEOUT_S)
        worker.terminate()
        assert worker.wait(40) == 0
        worker = scene.worker(pool=pool, concurrency=2, **QUICK)
    scene.settle(TIMEOUT_S)
    assert {len(scene.record.of("ended", job=job.id)) for job in jobs} == {1}
    assert {(scene.row(job).run_no, scene.row(job).losses) for job in jobs} == {(1, 0)}
    assert {tuple(one.what for one in job.history) for job in jobs} == {("made", "claimed", "completed")}


@pytest.mark.few(0)
def test_many_ends_and_kills_lose_and_double_nothing(scene: Scene) -> None:
    """What has written its unit is not repeated; what had nothing to write is, at most once for each kill."""
    generator = random.Random(7)
    worker = scene.worker(concurrency=2, **QUICK)
    quiet = [scene.enqueue("timed", (number,)) for number in range(200)]
    exact = [scene.enqueue("once", (number,)) for number in range(100)]
    kills = 6
    for killed in range(kills):
        aim = 40 * (killed + 1)
        wait_until(lambda: len(scene.record.of("ended")) + len(scene.ledger()) >= aim, timeout=TIMEOUT_S)  # noqa: B023
        _kill(worker, generator)
        worker.kill_group()
        worker = scene.worker(concurrency=2, **QUICK)
    scene.settle(TIMEOUT_S)
    assert {scene.row(job).status for job in (*quiet, *exact)} == {"completed"}
    assert sorted(value for _, _, _, value in scene.ledger()) == list(range(100))
    runs = [len(scene.record.of("ended", job=job.id)) for job in quiet]
    assert min(runs) == 1
    assert sum(runs) - len(runs) < 40 * kills, "what was held by a killed worker is repeated, and nothing else"
    assert list(scene.sidejob.dead) == []


def _kill(worker: WorkerProcess, generator: random.Random) -> None:
    """Kill a process of the pool first, or nothing."""
    processes = [pid for pid in worker.group() if pid != worker.pid]
    if processes and generator.random() < 0.5:
        os.kill(generator.choice(processes), signal.SIGKILL)


@pytest.mark.brokers("redis", "amqp")
def test_what_a_process_has_when_the_connection_to_the_broker_breaks_runs_once(scene: Scene) -> None:
    """The process has not said yet that it begins, and nobody can keep it from that."""
    with TcpProxy.to(scene.broker_url) as proxy:
        worker = scene.worker(**QUICK, BROKER_URL=proxy.url_for(scene.broker_url))
        process = idle(scene)
        os.kill(process, signal.SIGSTOP)
        job = scene.enqueue("timed", (1,))
        wait_until(lambda: claimed(scene) == [job.id], timeout=TIMEOUT_S, message="the run to be claimed")
        worker.wait_for_answer(scene.app, TIMEOUT_S)  # a round of its loop: it was sent
        proxy.cut()
        worker.wait_for_log("Connection to broker lost", TIMEOUT_S)
        worker.wait_for_answer(scene.app, TIMEOUT_S)
        os.kill(process, signal.SIGCONT)
        scene.settle(TIMEOUT_S)
    assert len(scene.record.of("ended", job=job.id)) == 1
    assert losses(scene, job) == [0]

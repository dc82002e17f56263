"""Processes are killed and frozen in the middle of runs: what ran runs again with its inputs, and nothing twice."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from celery_sidejob import Job
from tests.acceptance.scene import Scene
from tests.tools.waiting import wait_until

FAST = {"SIDEJOB_LEASE": "4", "SIDEJOB_HEARTBEAT_INTERVAL": "1", "SIDEJOB_LOST_AFTER": "2"}


def holding(scene: Scene, job: Job, *, count: int = 1, timeout: float = 15.0) -> dict[str, Any]:
    """The last of the `count` runs of the job that hold on."""
    return scene.record.wait_for("holding", count=count, timeout=timeout, job=job.id)[-1]


def ends_once(scene: Scene, job: Job, value: int = 1) -> None:
    """Let the job go on; its packet was read by exactly one committed unit."""
    scene.go(job)
    scene.settle(20)
    assert [(what, read) for of, _, what, read in scene.ledger() if of == job.id] == [("held", value)]
    assert (str(job.refresh().status), len(job.input("in"))) == ("completed", 0)


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_a_killed_pool_process_is_replaced_and_its_run_begins_again(scene: Scene) -> None:
    worker = scene.worker(concurrency=2)
    job, other = scene.hold(7), scene.hold(8)
    pid = holding(scene, job)["pid"]
    holding(scene, other)

    os.kill(pid, signal.SIGKILL)

    again = holding(scene, job, count=2)
    assert (again["value"], again["run"], scene.row(job).losses) == (7, 2, 1)
    assert scene.row(other).run_no == 1, "what the other processes run is left alone"
    scene.go(other)
    ends_once(scene, job, 7)
    assert scene.row(job).losses == 0
    assert worker.alive


def test_a_job_keeps_its_unique_key_through_the_death_of_its_worker_until_it_has_ended(scene: Scene) -> None:
    first = scene.worker()
    job = scene.hold(7, unique="k")
    holding(scene, job)

    first.kill()

    assert scene.enqueue("holder", unique="k") == job
    scene.worker()
    holding(scene, job, count=2)
    assert scene.enqueue("holder", unique="k") == job
    ends_once(scene, job, 7)
    assert scene.enqueue("holder", unique="k") != job


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_the_runs_of_a_killed_worker_begin_again_in_another(scene: Scene) -> None:
    first = scene.worker(concurrency=2)
    jobs = [scene.hold(value) for value in (1, 2)]
    for job in jobs:
        holding(scene, job)
    second = scene.worker(concurrency=2)
    lost = scene.losses_at_death(*jobs)

    first.kill()

    for (value, job), losses in zip(enumerate(jobs, 1), lost, strict=True):
        again = holding(scene, job, count=2)
        assert (again["value"], again["run"], scene.row(job).losses) == (value, 2, losses)
        assert again["pid"] in (second.pid, *second.children())
    scene.go(*jobs)
    for value, job in enumerate(jobs, 1):
        ends_once(scene, job, value)


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_all_workers_are_killed_and_a_new_one_takes_everything_up(scene: Scene) -> None:
    workers = [scene.worker(), scene.worker()]
    jobs = [scene.hold(value) for value in (1, 2, 3)]
    scene.record.wait_for("holding", count=2, timeout=15)
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)  # the third may be fetched, claimed, and given back
    lost = scene.losses_at_death(*jobs)

    for worker in workers:
        worker.kill_group()
    scene.worker(concurrency=3)

    scene.record.wait_for("holding", count=5, timeout=45)
    assert [scene.row(job).losses for job in jobs] == lost
    scene.go(*jobs)
    for value, job in enumerate(jobs, 1):
        ends_once(scene, job, value)


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_a_job_that_is_lost_too_often_fails_and_is_in_the_dead_set(scene: Scene) -> None:
    scene.worker(SIDEJOB_MAX_LOSSES="3")
    job = scene.hold()

    for run in (1, 2, 3):
        os.kill(holding(scene, job, count=run)["pid"], signal.SIGKILL)

    wait_until(lambda: job.refresh().status == "failed")
    scene.settle(15)
    (entry,) = scene.sidejob.dead
    assert (entry.reason, entry.task) == ("lost", "acceptance.holder")
    assert len(job.input("in")) == 1, "its packet is still there"

    scene.sidejob.dead.retry(entry.id)
    holding(scene, job, count=4)
    ends_once(scene, job)


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_a_committed_turn_resets_the_losses(scene: Scene) -> None:
    scene.worker(SIDEJOB_MAX_LOSSES="2")
    job = scene.hold(1, 2, 3, 4, 5, kwargs={"turns_before": 1})

    for run in (1, 2, 3):
        line = holding(scene, job, count=run)
        assert line["value"] == run + 1, "the committed turn's packet is gone, the lost one's is not"
        os.kill(line["pid"], signal.SIGKILL)

    holding(scene, job, count=4)
    scene.go(job)
    scene.settle(20)
    assert len(scene.sidejob.dead) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_a_body_that_leaves_its_process_is_run_again(scene: Scene, code: int) -> None:
    worker = scene.worker(SIDEJOB_LEASE="600")  # it is told at once, not by silence

    job = scene.enqueue("leaver", (code, 2))

    scene.settle(30)
    assert str(job.refresh().status) == "completed"
    assert [line["run"] for line in scene.record.of("leaver")] == [1, 2, 3]
    assert worker.alive


@pytest.mark.pools("prefork", "gevent", reason="has no time limits")
def test_a_hard_time_limit_is_a_failure_and_not_a_loss(scene: Scene) -> None:
    worker = scene.worker()
    job = scene.enqueue("slow")

    scene.settle(20)

    assert str(job.refresh().status) == "failed"
    assert len(scene.record.of("slow")) == 1
    (entry,) = scene.sidejob.dead
    assert entry.reason == "failed"
    assert "TimeLimitExceeded" in entry.error
    assert worker.alive


def test_a_cold_stop_gives_back_without_a_loss(scene: Scene) -> None:
    first = scene.worker()
    job = scene.hold()
    holding(scene, job)
    scene.worker()

    first.send_signal(signal.SIGQUIT)

    assert holding(scene, job, count=2)["run"] == 2
    assert scene.row(job).losses == 0
    ends_once(scene, job)


def test_a_frozen_worker_comes_back_as_a_zombie_and_changes_nothing(scene: Scene) -> None:
    frozen = scene.worker(**FAST)
    job = scene.enqueue("zombie")
    holding(scene, job)
    scene.worker(**FAST)

    frozen.stop_signal()
    holding(scene, job, count=2)
    assert scene.record.of("go") == []
    scene.go(job)
    scene.record.wait_for("done", run=2, job=job.id)
    frozen.cont()

    (refused,) = scene.record.wait_for("refused", job=job.id)
    assert (refused["run"], refused["error"]) == (1, "LeaseLostError")
    scene.settle(20)
    assert [(run, what) for _, run, what, _ in scene.ledger()] == [(2, "effect")]
    assert str(job.refresh().status) == "completed"
    frozen.wait_for_log("was declared dead while it was silent")
    wait_until(lambda: len(scene.sql("SELECT id FROM workers WHERE dead_at IS NULL")) == 2, message="a new identity")


def test_a_worker_frozen_in_the_middle_of_a_commit_does_not_keep_its_job(scene: Scene) -> None:
    frozen = scene.worker(pool="solo", SIDEJOB_CRASH_POINTS="checkpoint:before-commit=stop", **FAST)
    job = scene.enqueue("stepper", (2,))
    wait_until(lambda: psutil.Process(frozen.pid).status() == psutil.STATUS_STOPPED, timeout=15)
    scene.worker(**FAST)

    job.wait(timeout=30)
    frozen.cont()
    frozen.wait_for_log("is no longer its current run")
    scene.settle(20)
    assert (str(job.refresh().status), list(job.output("steps"))) == ("completed", [0, 1])


def test_a_frozen_worker_is_refused_before_the_other_run_has_ended(scene: Scene) -> None:
    """The zombie's commit comes while the run that replaced it is still under way."""
    frozen = scene.worker(**FAST)
    job = scene.enqueue("zombie")
    holding(scene, job)
    frozen.stop_signal()
    other = scene.worker(**FAST)
    holding(scene, job, count=2)
    other.stop_signal()
    frozen.cont()
    scene.go(job)

    scene.record.wait_for("refused", run=1, job=job.id)
    assert scene.ledger() == []
    other.cont()
    scene.settle(30)
    assert [what for _, _, what, _ in scene.ledger()] == ["effect"]


def test_a_task_that_keeps_the_interpreter_to_itself_is_not_run_twice(scene: Scene) -> None:
    busy = scene.worker(pool="solo", name="busy", **FAST)
    scene.worker(pool="solo", queues="elsewhere", name="watching", **FAST)
    job = scene.enqueue("stubborn", (3.0,))

    scene.record.wait_for("stubborn", timeout=15)
    scene.settle(20)

    assert scene.row(job).run_no == 1
    assert [what for _, _, what, _ in scene.ledger()] == ["stubborn"]
    assert "declared dead" not in busy.log()

"""A job whose task a deployment has taken away is parked, costs nothing, and goes on when a worker knows the task."""

from __future__ import annotations

import pytest

from celery_sidejob import Job
from tests.acceptance.scene import Scene
from tests.tools.waiting import wait_until
from tests.tools.workers import WorkerProcess

APP = "tests.acceptance.deployed_app"


def worker(scene: Scene, *, knows: bool, name: str) -> WorkerProcess:
    env = {**scene.env, "SIDEJOB_LOST_AFTER": "2", **({"KNOWS": "1"} if knows else {})}
    return scene.processes.start_worker(APP, env=env, name=name)


@pytest.fixture
def vanished(scene: Scene) -> Job:
    """A parked job, and a worker that does not know its task."""
    first = worker(scene, knows=True, name="old")
    assert scene.sql("SELECT 1 FROM registry WHERE task = 'deployed.vanishes'"), "a worker registers before it is ready"
    first.terminate()
    first.wait()
    job = scene.sidejob.enqueue("deployed.vanishes")
    worker(scene, knows=False, name="new")
    wait_until(lambda: scene.sql("SELECT 1 FROM parked"), message="the job to be parked")
    return job


def test_a_job_whose_task_vanished_is_parked_and_goes_on_by_itself(scene: Scene, vanished: Job) -> None:
    [row] = scene.sql("SELECT job_id, task, queue, end_at FROM parked")
    assert row == (vanished.id, "deployed.vanishes", "acceptance", None)
    assert vanished.refresh().status == "queued"
    assert scene.app.AsyncResult(vanished.task_id).state == "PENDING"
    scene.sidejob.enqueue("deployed.stays")
    scene.record.wait_for("stays")
    [before] = scene.sql("SELECT xmin, due_at, published_at FROM messages")

    # A run that is asked for meanwhile changes nothing, and the sweeper leaves the row alone.
    vanished.run()
    for _ in range(3):
        scene.sidejob.poll()
    assert scene.sql("SELECT xmin, due_at, published_at FROM messages") == [before]

    worker(scene, knows=True, name="newer")
    assert vanished.wait(timeout=30).status == "completed"
    assert len(scene.record.of("vanishes")) == 1
    assert scene.sql("SELECT 1 FROM parked") == []


def test_a_parked_job_that_is_terminated_ends_without_its_shutdown_which_is_told(scene: Scene, vanished: Job) -> None:
    vanished.terminate()
    wait_until(lambda: scene.sql("SELECT 1 FROM parked WHERE end_at > now()"), message="the shutdown to be parked")
    assert vanished.refresh().status == "terminating"
    scene.sql("UPDATE parked SET end_at = now()")

    assert vanished.wait(timeout=30).status == "terminated"
    assert scene.record.of("shutdown") == []
    assert scene.sql("SELECT 1 FROM parked") == []
    [new] = [process for process in scene.processes.started if process.name == "new"]
    new.wait_for_log(f"Job {vanished.id} was terminated without its shutdown")


def test_a_shutdown_runs_if_a_worker_comes_to_know_the_task_in_time(scene: Scene, vanished: Job) -> None:
    vanished.terminate()
    wait_until(lambda: scene.sql("SELECT 1 FROM parked WHERE end_at > now()"), message="the shutdown to be parked")
    worker(scene, knows=True, name="newer")
    assert vanished.wait(timeout=30).status == "terminated"
    assert len(scene.record.of("shutdown")) == 1
    assert scene.record.of("vanishes") == []


def test_a_message_that_comes_to_the_wrong_worker_of_a_mixed_fleet_is_sent_again(scene: Scene) -> None:
    worker(scene, knows=True, name="old")
    wait_until(
        lambda: scene.sql("SELECT 1 FROM served WHERE 'deployed.vanishes' = ANY(tasks)"), message="what it serves"
    )
    worker(scene, knows=False, name="new")
    jobs = [scene.sidejob.enqueue("deployed.vanishes") for _ in range(8)]
    for job in jobs:
        assert job.wait(timeout=60).status == "completed"
    assert scene.sql("SELECT 1 FROM parked") == []

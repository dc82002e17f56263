"""Tags, histories, tracked jobs, workers and failure groups, as a client sees them while real workers run and die."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from celery_sidejob import Job
from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until


def until(followed: Any, status: str) -> list[dict[str, Any]]:
    """What is told of a tracked job until it has moved to this status."""
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1].get("status") != status:
        messages.append(next(followed).message)
    return messages


def in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The changes of one job's status by their numbers, whichever of several processes was quicker to tell."""
    return sorted((message for message in messages if "status" in message), key=lambda message: message["change"])


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_a_job_is_found_and_followed_through_the_deaths_of_its_processes(scene: Scene) -> None:
    sidejob = scene.sidejob
    with sidejob.subscribe("/sidejob/tracked", timeout=30) as followed:
        worker = scene.worker(**QUICK)
        job = scene.enqueue("parcel", tags=["customer:7"], created_by="me", countdown=3600).track()
        other = scene.enqueue("parcel", tags=["customer:7", "express"], countdown=3600)
        job.run(force=True)
        pid = scene.record.wait_for("holding", timeout=15, job=job.id)[0]["pid"]

        (here,) = sidejob.workers()
        assert here.name.split(":")[1] == str(worker.pid)
        assert (here.queues, here.running) == (["acceptance"], [job])
        assert sidejob.jobs(tag="packed") == [job], "its body's commit gave it this tag"
        assert sidejob.jobs(tag="customer:7") == [job, other]

        messages = until(followed, "running")  # it is told by the process that is killed now
        os.kill(pid, signal.SIGKILL)
        messages += until(followed, "completed")

    made, *entries = job.history
    assert (made.what, made.run_no, made.worker, made.detail) == ("made", None, None, {"by": "me"})
    lost = entries[2].detail
    assert lost is not None
    assert (lost["signal"], lost["process"], lost["worker"]) == ("SIGKILL", pid, here.name)
    assert [(entry.what, entry.run_no, entry.detail) for entry in entries] == [
        ("claimed", 1, None), ("packed", 1, {"run": 1}), ("lost", 1, lost),
        ("claimed", 2, None), ("packed", 2, {"run": 2}), ("retried", 2, None),
        ("claimed", 3, None), ("packed", 3, {"run": 3}), ("completed", 3, None),
    ]  # fmt: skip
    assert {entry.worker for entry in entries} == {here.name}
    assert {"job": job.id, "lost": True, "run": 1} in messages
    assert [(message["status"], message["run"]) for message in in_order(messages) if message["run"]] == [
        ("running", 1), ("queued", 1), ("running", 2), ("queued", 2), ("running", 3), ("completed", 3),
    ]  # fmt: skip
    assert in_order(messages)[-1]["change"] == job.refresh().info["change"]

    held = scene.hold()
    scene.record.wait_for("holding", timeout=15, job=held.id)
    assert sidejob.workers()[0].running == [held]
    (is_lost,) = scene.losses_at_death(held)
    worker.kill_group()
    wait_until(lambda: sidejob.poll() and not sidejob.workers(), timeout=30, message="the worker to be declared dead")
    last = held.history[-1]
    assert (last.what, last.run_no, last.worker) == ("lost" if is_lost else "given back", 1, here.name)
    assert (last.detail or {}).get("kind") == ("disconnected" if is_lost else None)


def test_failures_of_a_group_are_retried_in_their_order(scene: Scene) -> None:
    scene.worker(**QUICK)
    shelves = {shelf: scene.enqueue("picker", (shelf,), countdown=3600) for shelf in "abc"}

    def fail(job: Job) -> None:
        job.run(force=True)
        wait_until(lambda: job.refresh().status == "failed", timeout=15, message=f"job {job.id} to fail")

    for shelf in "cab":
        fail(shelves[shelf])
    dead = scene.sidejob.dead
    assert dead.groups() == {"no stock": 3}
    assert [entry.job_id for entry in dead.list(group="no stock")] == [shelves[shelf].id for shelf in "bac"]
    assert {entry.error for entry in dead} == {f"JobFailed: Shelf {shelf} is empty." for shelf in shelves}

    assert dead.retry_all(group="no stock") == 3

    picked = scene.record.wait_for("picked", count=3, timeout=15)
    assert [line["shelf"] for line in picked] == ["c", "a", "b"]
    assert len(dead) == 0

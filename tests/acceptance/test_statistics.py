"""The statistics of two real workers: they say of each run what the runs have written down themselves."""

from __future__ import annotations

import os
import signal

import pytest

from celery_sidejob.model.statistics import Statistics
from tests.acceptance.durable_site import APP, TIMEOUT_S, Site, site_fixture  # noqa: F401 - the fixture `site`
from tests.acceptance.scene import Scene
from tests.tools.commands import ask
from tests.tools.waiting import wait_until

SLOW_S = 0.3
MANY = 30


def statistics(scene: Scene, task: str) -> Statistics:
    return scene.sidejob.statistics(task=f"acceptance.{task}", day=None)


def test_workers_count_what_their_runs_have_taken(scene: Scene) -> None:
    """Jobs and durable tasks; on two workers, with failures and retries."""
    for _ in range(2):
        scene.worker(concurrency=2)
    for number in range(MANY):
        scene.enqueue("timed", (number, SLOW_S if number % 10 == 0 else 0.0))
        scene.app.send_task("acceptance.timed_task", (1000 + number, SLOW_S if number % 10 == 0 else 0.0))
    scene.enqueue("retried", (3000, 0.0))
    scene.app.send_task("acceptance.retried_task", (3001, 0.0))
    scene.app.send_task("acceptance.failing_task")
    wait_until(lambda: len(scene.record.of("ended")) == 2 * MANY + 2, timeout=60, message="all runs")

    runs = {"timed": MANY, "timed_task": MANY, "retried": 3, "retried_task": 3, "failing_task": 1}

    def counted() -> bool:
        found = {task: statistics(scene, task) for task in runs}
        taken = {task: (one.runs.count, one.waits.count) for task, one in found.items()}
        return taken == {task: (count, count) for task, count in runs.items()}

    wait_until(counted, timeout=30, message="the statistics of all runs")
    for task in ("timed", "timed_task"):
        found = statistics(scene, task)
        slow = sum(count for bound, count in found.runs.histogram if bound > 0.25)
        assert slow >= MANY // 10
        assert found.runs.sum_s >= SLOW_S * MANY / 10
        assert found.waits.sum_s > 0, task
        assert (found.failures, found.retries, found.losses, found.failed_now) == (0, 0, 0, 0)
    assert [statistics(scene, task).retries for task in ("retried", "retried_task")] == [2, 2]
    failing = statistics(scene, "failing_task")
    assert (failing.failures, failing.failed_now) == (1, 1)


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_a_run_that_is_lost_is_counted_by_its_worker(scene: Scene) -> None:
    worker = scene.worker(concurrency=1)
    scene.enqueue("timed", (1, 30.0))
    scene.record.wait_for("began", number=1)
    os.kill(worker.children()[0], signal.SIGKILL)
    wait_until(lambda: statistics(scene, "timed").losses == 1, timeout=30, message="the loss of the job's run")
    scene.record.wait_for("began", number=1, count=2)
    assert statistics(scene, "timed").runs.count == 0


def test_the_durable_tasks_that_ended_last_are_kept_if_the_app_wants_it(site: Site) -> None:
    worker = site.worker(env={"SIDEJOB_TASK_HISTORY": "3"})
    for number in range(3):
        assert site.call("noted", number).get(timeout=TIMEOUT_S) == number
    failed, retried = site.call("failing"), site.call("retrying", 1)
    site.wait_quiet()
    worker.terminate()  # its processes store what they have counted
    worker.wait(TIMEOUT_S)

    found = ask(site.app, "tasks", "--finished", "--json").document

    assert len(found) == 3
    assert {(each["task_id"], each["status"]) for each in found} >= {
        (failed.id, "failed"), (retried.id, "completed"),
    }  # fmt: skip
    assert all(each["lasted_s"] >= 0 and each["queue"] == "durable" for each in found)
    shown = ask(site.app, "tasks", "--finished", "--task", f"{APP}.failing").lines
    assert len(shown) == 2
    assert shown[1].startswith(f"{failed.id} failed {APP}.failing durable 20")

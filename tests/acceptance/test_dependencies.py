"""Jobs that wait for others, that go on with another task, and that are moved, on real workers that are killed."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until


def has_ended(scene: Scene, runs: int) -> bool:
    return len(scene.record.of("ended")) >= runs


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", reason="several runs at once")
def test_no_job_begins_before_those_it_depends_on_whatever_is_killed(scene: Scene) -> None:
    """Twelve layers of four jobs, each of which depends on two of the layer below."""
    chosen, worker = random.Random(3), scene.worker(concurrency=3, name="worker0", **QUICK)
    below, on = [scene.enqueue("timed", (number, 0.02)) for number in range(4)], {}
    for layer in range(1, 12):
        layer_below, below = below, []
        for number in range(4):
            depends_on = chosen.sample(layer_below, 2)
            below.append(scene.enqueue("timed", (layer * 4 + number, 0.02), depends_on=depends_on))
            on[below[-1].id] = [job.id for job in depends_on]
    for number in (1, 2):
        wait_until(partial(has_ended, scene, number * 8), timeout=40, message="some runs")
        worker.kill()
        worker = scene.worker(concurrency=3, name=f"worker{number}", **QUICK)
    scene.settle(60)

    jobs = {row.id: row for row in scene.sql("SELECT id, status, ran_at, ended_at, losses FROM jobs")}
    assert {row.status for row in jobs.values()} == {"completed"}
    late = [(job_id, each) for job_id, ons in on.items() for each in ons if jobs[job_id].ran_at < jobs[each].ended_at]
    assert late == []
    assert scene.sql("SELECT count(*) AS n FROM dependencies")[0].n == 0


def test_a_job_is_moved_from_a_worker_that_has_fetched_it(scene: Scene) -> None:
    scene.worker(concurrency=1, pool="solo", name="one", **QUICK)
    held = scene.hold(0)
    scene.record.wait_for("holding", count=1, timeout=15)
    moved = scene.enqueue("timed", (1,))
    moved.move(queue="elsewhere")
    scene.worker(queues="elsewhere", name="other", **QUICK)
    wait_until(lambda: [line["number"] for line in scene.record.of("ended")] == [1], timeout=20, message="its run")
    scene.go(held)
    scene.settle(20)
    (line,) = scene.record.of("began")
    assert (line["number"], str(moved.refresh().status), moved.queue) == (1, "completed", "elsewhere")

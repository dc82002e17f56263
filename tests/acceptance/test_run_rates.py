"""Jobs with a rate on real workers, some of which die at the wrong moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_sidejob import Job
from tests.acceptance.scene import QUICK, Scene

RUNS, BURST = 18, 5


def check_pace(scene: Scene, job: Job) -> None:
    """Every run has begun once for each ask, and in no stretch of time were there more than the bucket allows."""
    begun = [(event["number"], event["at"]) for event in scene.record.of("paced")]
    assert [number for number, _ in begun] == list(range(1, RUNS + 1))
    for last in range(RUNS):
        for first in range(last):
            allowed = BURST + BURST * (begun[last][1] - begun[first][1])
            assert last - first + 1 <= allowed + 1e-3, begun[first : last + 1]
    assert (str(job.refresh().status), job.get("runs")) == ("completed", RUNS)


def test_a_job_runs_as_often_as_its_rate_allows_and_as_it_was_asked(scene: Scene) -> None:
    scene.worker()
    job = scene.enqueue("paced", (RUNS,))
    scene.settle(40)
    check_pace(scene, job)


@pytest.mark.few(2)
@pytest.mark.pools("prefork", reason="a process of the pool is killed")
@pytest.mark.parametrize(
    "point", ["claim:before-commit", "claim:after-commit", "end:before-commit", "end:after-commit"]
)
def test_a_process_that_dies_around_a_delayed_claim_costs_no_ask_and_no_token(
    scene: Scene, tmp_path: Path, point: str
) -> None:
    plan = f"{point}=kill-child@{BURST + 4}"
    scene.worker(**QUICK, SIDEJOB_CRASH_POINTS=plan, SIDEJOB_CRASH_ONCE=str(tmp_path / "acted"))
    job = scene.enqueue("paced", (RUNS,))
    scene.settle(60)
    assert (tmp_path / "acted").exists()
    if point == "end:before-commit":  # its body ran, and its unit was not committed
        again = [event["number"] for event in scene.record.of("paced")].count(BURST + 4)
        assert again == 2
        assert (str(job.refresh().status), job.get("runs")) == ("completed", RUNS)
    else:
        check_pace(scene, job)


def test_a_worker_that_is_killed_while_a_run_is_delayed_delays_it_no_further(scene: Scene) -> None:
    worker = scene.worker(**QUICK)
    job = scene.enqueue("paced", (RUNS,))
    scene.record.wait_for("paced", count=BURST + 1)
    worker.kill()
    scene.worker(**QUICK)
    scene.settle(60)
    numbers = [event["number"] for event in scene.record.of("paced")]
    assert sorted(set(numbers)) == list(range(1, RUNS + 1))
    assert (str(job.refresh().status), job.get("runs")) == ("completed", RUNS)


def test_a_job_that_is_too_fast_ends(scene: Scene) -> None:
    scene.worker()
    job = scene.enqueue("hasty")
    scene.settle(30)
    assert str(job.refresh().status) == "terminated"
    assert (len(scene.record.of("hasty")), len(scene.record.of("hasty ended"))) == (BURST, 1)

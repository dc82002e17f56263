"""A walk through the crash points: at each of them a process dies, or an answer is lost, once.

A point is before or after a commit (`<transaction>:before-commit`, `:after-commit`) or a call of the broker. After
each, the workload comes to its end, the checker finds nothing, and what is to be there exactly once is.

CI shares a start of the workers among many points: each acts once, and the test fails if one of them was not reached.
The full walk takes every point of every process by itself: ``pytest -m slow tests/acceptance``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import psycopg
import pytest

from tests.acceptance import checker
from tests.acceptance.scene import QUICK, Scene, Workload
from tests.tools.waiting import wait_until


def around(*transactions: str) -> list[str]:
    """The points before and after the commits of these transactions."""
    return [f"{name}:{side}-commit" for name in transactions for side in ("before", "after")]


BROKER = ["publish:before", "publish:after"]
IN_RUNS = [*around("claim", "take", "checkpoint", "end", "mark", "settle", "mature", "enqueue"), *BROKER]
"""What a process of the pool comes past with the workload."""
IN_SWEEPER = [
    "sweep:before",
    "sweep:before-publish",
    *around("lease", "mature", "reserve", "mark"),
    *BROKER,
]
"""What the parent process of the worker that sweeps comes past, while others run the jobs."""
IN_RESCUE = ["rescue:before", *around("take-back")]
RESERVED = {"reserve:after-commit", "sweep:before-publish", *BROKER, "mark:before-commit"}
"""Where a sweeper that dies leaves messages reserved: half a minute passes before another may publish them."""
CALLS = ["enqueue", "write", "run", "terminate", "mark"]


def plan(points: Iterable[str], action: str) -> str:
    """Every point acts once."""
    return ",".join(f"{point}={action}" for point in points)


@pytest.fixture
def acted(tmp_path: Path) -> Path:
    """Where each point leaves a file when it acts."""
    path = tmp_path / "acted"
    path.mkdir()
    return path


def armed(acted: Path, points: Iterable[str], action: str) -> dict[str, str]:
    """The variables of a worker that acts at these points."""
    return {**QUICK, "SIDEJOB_CRASH_POINTS": plan(points, action), "SIDEJOB_CRASH_ONCE": str(acted)}


def names(acted: Path) -> set[str]:
    """The points that have acted."""
    return {path.name for path in acted.iterdir()}


def finish(scene: Scene, workload: Workload, timeout: float) -> None:
    scene.settle(timeout)
    workload.judge()


# -- CI: many points in one life --------------------------------------------------------------------------------------


def test_processes_of_the_pool_are_killed_at_every_point(scene: Scene, acted: Path) -> None:
    scene.worker(queues="elsewhere", name="sweeps", **QUICK)
    scene.worker(concurrency=2, **armed(acted, IN_RUNS, "kill"))
    workload = Workload.start(scene)
    finish(scene, workload, 55)
    assert names(acted) == set(IN_RUNS)


def test_every_answer_is_lost_once(scene: Scene, acted: Path) -> None:
    points = [*IN_RUNS, *around("lease", "reserve", "read"), *IN_RESCUE, "sweep:before"]
    env = armed(acted, points, "lost")
    # A loss of a process, for what is reached only by a rescue.
    env["SIDEJOB_CRASH_POINTS"] += ",sweep:before-publish=lost"
    scene.worker(concurrency=2, **env)
    workload = Workload.start(scene)
    killed = scene.enqueue("leaver", (3, 1))
    finish(scene, workload, 55)
    assert str(killed.refresh().status) == "completed"
    assert names(acted) == {*points, "sweep:before-publish"}


# -- one point at a time ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill", "lost"])
@pytest.mark.parametrize("point", [*IN_RUNS, *around("read")])
def test_one_point_in_the_pool(scene: Scene, acted: Path, point: str, action: str) -> None:
    scene.worker(queues="elsewhere", name="sweeps", **QUICK)
    scene.worker(concurrency=2, **armed(acted, [point], action))
    workload = Workload.start(scene)
    finish(scene, workload, 50)
    assert names(acted) == {point}


def _slow_where_reserved(points: list[str]) -> list[object]:
    return [pytest.param(point, marks=[pytest.mark.slow] if point in RESERVED else []) for point in points]


CI_KILLS = ["lease:after-commit", "mature:before-commit", "mature:after-commit", "reserve:before-commit"]


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in CI_KILLS else [pytest.mark.slow]) for point in IN_SWEEPER]
)
def test_the_sweeper_is_killed_and_another_follows(scene: Scene, acted: Path, point: str) -> None:
    sweeper = scene.worker(queues="elsewhere", name="sweeps", **armed(acted, [point], "kill")) if not (
        point.startswith(("lease", "sweep:before")) and point != "sweep:before-publish"
    ) else None  # fmt: skip
    follower = scene.worker(concurrency=2, name="follows", **QUICK)
    if sweeper is None:  # it is reached at once: by a worker that follows and then is killed, so by the second
        pytest.skip("covered by the kills of sweepers in recovery")
    workload = Workload.start(scene)
    _ask_without_dispatch(scene)
    assert sweeper.wait(20) == -9, "it has died at the point"
    finish(scene, workload_with_borrowed(workload), 50 if point in RESERVED else 30)
    assert follower.alive

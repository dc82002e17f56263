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

import pytest

from tests.acceptance.scene import QUICK, Scene, Workload


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
IN_RESCUE = ["rescue:before", *around("rescue")]
AT_EVERY_TURN = {"sweep:before", *around("lease")}
CLAIMS, ENDS = 1, 2
"""Which page of a worker that has one job is of its claim, and which of its end."""
IN_CLIENT = {
    "making": around("enqueue", "write"),
    "asking": around("run", "terminate"),
    "ringing": [*around("mark"), *BROKER],
}
"""What a client comes past, by what it does there."""


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


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
@pytest.mark.slow
def test_processes_of_the_pool_are_killed_at_every_point(scene: Scene, acted: Path) -> None:
    scene.worker(queues="elsewhere", name="sweeps", **QUICK)
    # What follows an asking's end is made by the sweeper after the first of its two points, so here it is the second.
    points = [point for point in IN_RUNS if point != "enqueue:before-commit"]
    worker = scene.worker(concurrency=2, **armed(acted, points, "kill-child"))
    workload = Workload.start(scene)
    finish(scene, workload, 50)
    assert names(acted) == set(points)
    assert worker.alive


@pytest.mark.slow
def test_every_answer_is_lost_once(scene: Scene, acted: Path, worker_pool: str) -> None:
    points = {*IN_RUNS, *IN_SWEEPER, *IN_RESCUE, *around("read")}
    if worker_pool != "prefork":
        points.remove("rescue:before")  # the run is rescued by its own process, not by one that finds it held
    scene.worker(concurrency=2, **armed(acted, points, "lost"))
    workload = Workload.start(scene)
    rescued = scene.enqueue("leaver", (3, 1))
    finish(scene, workload, 50)
    assert str(rescued.refresh().status) == "completed"
    assert names(acted) == points


# -- one point at a time ----------------------------------------------------------------------------------------------


@pytest.mark.pools("prefork", reason="the one who sweeps would be killed")
@pytest.mark.slow
@pytest.mark.parametrize("action", ["kill-child", "lost"])
@pytest.mark.parametrize("point", [*IN_RUNS, *around("read")])
def test_one_point_in_the_pool(scene: Scene, acted: Path, point: str, action: str) -> None:
    scene.worker(queues="elsewhere", name="sweeps", **QUICK)
    scene.worker(concurrency=2, **armed(acted, [point], action))
    workload = Workload.start(scene)
    finish(scene, workload, 50)
    assert names(acted) == {point}


def in_ci(points: Iterable[str], *chosen: str) -> list[object]:
    """Leave all but the chosen points to the full walk."""
    return [pytest.param(point, marks=[] if point in chosen else [pytest.mark.slow]) for point in points]


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "solo", reason="claims no pages")
@pytest.mark.parametrize(
    ("passage", "side", "action", "runs", "bodies"),
    [
        (CLAIMS, "before", "kill", 1, 1),
        (CLAIMS, "after", "kill", 2, 1),  # it was claimed and had not begun
        (CLAIMS, "before", "lost", 1, 1),
        (CLAIMS, "after", "lost", 2, 1),
        (ENDS, "before", "kill", 2, 2),
        (ENDS, "after", "kill", 1, 1),
        (ENDS, "before", "lost", 1, 1),
        (ENDS, "after", "lost", 1, 1),
    ],
)
def test_a_page_of_claims_and_one_of_ends(
    scene: Scene, acted: Path, passage: int, side: str, action: str, runs: int, bodies: int
) -> None:
    """The worker with the messages dies, or hears no answer; a run that nobody has begun counts as no loss."""
    env = armed(acted, [point := f"claim-page:{side}-commit"], action)
    env["SIDEJOB_CRASH_POINTS"] += f"@{passage}"
    worker = scene.worker(**env)
    job = scene.enqueue("waiter")
    scene.go(job)
    if action == "kill":
        assert worker.wait(20) == -9
        worker.kill_group()
        scene.worker(**QUICK)
    scene.settle(50)
    assert names(acted) == {point}
    row = scene.row(job)
    assert (row.status, row.run_no, row.losses) == ("completed", runs, 0)
    assert len(scene.record.of("went", job=job.id)) == bodies
    assert [one.what for one in job.history if one.what in ("lost", "failed", "completed")] == ["completed"]


@pytest.mark.parametrize("point", in_ci(IN_SWEEPER, "mature:after-commit", "reserve:before-commit"))
def test_the_sweeper_is_killed_and_another_follows(scene: Scene, acted: Path, point: str) -> None:
    if point.startswith("reserve") and scene.broker.kind == "sidejobpg":
        pytest.skip("sidejobpg: a kept message is in its queue by the commit that keeps it, and is published by nobody")
    env = armed(acted, [point], "kill")
    if point in AT_EVERY_TURN:
        env["SIDEJOB_CRASH_POINTS"] += "@10"  # not before it is ready
    sweeper = scene.worker(queues="elsewhere", name="sweeps", **env)
    workload = Workload.start(scene)
    assert sweeper.wait(20) == -9, "it has died at the point"
    follower = scene.worker(concurrency=2, name="follows", **QUICK)
    finish(scene, workload, 30)
    assert follower.alive


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
@pytest.mark.parametrize("point", in_ci(IN_RESCUE, "rescue:after-commit"))
def test_the_sweeper_is_killed_while_it_rescues(scene: Scene, acted: Path, point: str) -> None:
    sweeper = scene.worker(queues="elsewhere", name="sweeps", **armed(acted, [point], "kill"))
    runs = scene.worker(concurrency=2, name="runs", **QUICK)
    jobs = [scene.hold(0), scene.hold(1)]
    scene.record.wait_for("holding", count=2, timeout=15)

    runs.kill()

    assert sweeper.wait(20) == -9
    scene.worker(concurrency=2, name="follows", **QUICK)
    scene.record.wait_for("holding", count=4, timeout=25)
    assert [scene.row(job).run_no for job in jobs] == [2, 2], "each was taken once, whoever rescued it"
    scene.go(*jobs)
    scene.settle(20)
    assert sorted(value for _, _, what, value in scene.ledger() if what == "held") == [0, 1]


# -- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("action", ["kill", "lost"])
@pytest.mark.parametrize("doing", IN_CLIENT)
def test_a_client_at_every_point(scene: Scene, acted: Path, doing: str, action: str) -> None:
    """What has returned happens; what has not happens as a whole or not at all."""
    if scene.broker.is_store and doing == "ringing":
        pytest.skip("sidejobpg: has a message with the commit that keeps it")
    scene.worker(concurrency=2, **QUICK)
    for point in IN_CLIENT[doing]:
        scene.record.path.unlink(missing_ok=True)
        scene.sql("DELETE FROM jobs")  # no TRUNCATE: its locks and those of the worker's sweeper may close a circle
        client = scene.processes.start(
            [sys.executable, "-m", "tests.acceptance.client"],
            env={**scene.env, **armed(acted, [point], action)}, name=point.replace(":", "-"),
        )  # fmt: skip
        code = client.wait(20)
        assert code == (-9 if action == "kill" else 0), client.log_tail()
        assert names(acted) >= {point}
        scene.settle(30)
        _judge_client(scene, point)


def _judge_client(scene: Scene, point: str) -> None:
    returned = {line["call"] for line in scene.record.of("returned")}
    asked = {line["call"] for line in scene.record.of("asked")}
    job = scene.sidejob.find("client")
    if job is None:
        assert not returned, point
        return
    sums = [value for of, _, what, value in scene.ledger() if of == job.id and what == "sum"]
    shutdowns = [what for of, _, what, _ in scene.ledger() if of == job.id and what == "shutdown"]
    if "terminate" in returned:
        assert (str(job.status), shutdowns) == ("terminated", ["shutdown"]), point
    elif "terminate" not in asked:
        assert shutdowns == [], point
    # A termination overtakes runs that were asked for before it, but no packet is read twice, and none is lost.
    written = {"write a", "write b"} & returned
    left = len(job.input("a")) + len(job.input("b"))
    assert len(sums) <= 1, point
    assert left + 2 * len(sums) >= len(written), point
    if written == {"write a", "write b"} and "terminate" not in asked:
        assert sums == [3], point

"""Steps in real workers whose processes are killed around every commit of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from celery_sidejob import Status
from tests.acceptance.scene import QUICK, Scene
from tests.acceptance.test_crash_points import names, plan

APP = "tests.acceptance.ordering"

STEPS = ("charge", "wrap", "pack", "measure", "undo", "answers", "answers#2")
POINTS = [
    *(f"step[{step}]:{side}-commit" for step in STEPS for side in ("before", "after")),
    *(f"{name}:{side}-commit" for name in ("unit", "end", "claim") for side in ("before", "after")),
]


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_an_order_whose_process_is_killed_around_each_step(scene: Scene, tmp_path: Path) -> None:
    acted = tmp_path / "acted"
    acted.mkdir()
    points = {"SIDEJOB_CRASH_POINTS": plan(POINTS, "kill"), "SIDEJOB_CRASH_ONCE": str(acted)}
    scene.processes.start_worker(APP, env={**scene.env, **QUICK, **points}, concurrency=2)
    job = scene.sidejob.enqueue("ordering.fulfil", (42,))
    job.input("answers").write("yes")
    job.wait(timeout=90)

    assert job.refresh().status == Status.COMPLETED, job.info["error"]
    assert names(acted) == set(POINTS)
    done = Counter(what for _, _, what, _ in scene.ledger())
    assert done.pop("invoice") == 1, "own rows are in the commit of their step"
    assert set(done) == {"charge", "wrap", "undo"}
    assert set(done.values()) <= {1, 2, 3}, (
        "what a step does elsewhere is repeated if its process dies before the record"
    )
    assert job.state == {"invoiced": True, "result": [7, {"parcel": 42}, [0, 10, 20], "yes", True, {"of": 7}]}
    assert [packet.value for packet in job.output("done").peek()] == [42], "what is done outside of steps is done once"
    assert scene.sql("SELECT count(*) AS count FROM steps")[0].count == 0
    assert job.info["run_no"] > len(POINTS) / 2

"""Several jobs read one output port while their workers are killed: each packet counts once, and no run is refused."""

from __future__ import annotations

import pytest

from tests.acceptance.scene import QUICK, Scene
from tests.tools.waiting import wait_until

PACKETS = 200


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_a_parent_and_another_job_read_a_childs_output(scene: Scene) -> None:
    workers = [scene.worker(**QUICK), scene.worker(**QUICK)]
    parent = scene.enqueue("collector")
    child = scene.hold(*range(PACKETS), task="connector", parent=parent, child_name="source")
    wait_until(lambda: child.refresh().status == "completed", timeout=30)
    other = scene.enqueue("collector", [child.id])
    kills = 3
    for kill in range(kills):
        scene.record.wait_for("collected", count=15 * (kill + 1), timeout=60)
        workers.pop(0).kill()
        workers.append(scene.worker(**QUICK))
    scene.settle(60)

    assert sorted(value for _, _, what, value in scene.ledger() if what == "collected") == list(range(PACKETS))
    assert len(child.output("x")) == 0
    # A run of the parent for itself, for its child's end and for what a lost reader had taken; one more for each kill.
    for job in (parent, other):
        assert scene.row(job).status == "completed"
        assert scene.row(job).run_no <= 3 + 2 * kills

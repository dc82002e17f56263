"""The workload of the other tests, with nothing dying."""

from __future__ import annotations

from tests.acceptance.scene import Scene, Workload


def test_the_workload_comes_to_its_end(scene: Scene) -> None:
    worker = scene.worker(concurrency=2)
    workload = Workload.start(scene)
    scene.settle(20)
    workload.judge()

    worker.terminate()
    assert worker.wait() == 0, "nothing hangs"

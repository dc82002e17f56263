"""Many wakes of one job at a time: it runs a handful of times, not once for each."""

from __future__ import annotations

from tests.acceptance.scene import Scene
from tests.tools.waiting import patient

CHILDREN = 250
A_HANDFUL = 6


def test_a_parent_whose_children_end_together_runs_a_handful_of_times(scene: Scene) -> None:
    """Its doorbell waits behind theirs: by the time that it is answered, most have ended."""
    scene.worker(concurrency=2)
    parent = scene.enqueue("brood", (CHILDREN,))
    parent.wait(timeout=patient(120))
    found = scene.sidejob.jobs(parent=parent, limit=CHILDREN)
    assert [str(job.status) for job in (parent.refresh(), *found)] == ["completed"] * (CHILDREN + 1)
    assert len(scene.record.of("brood")) <= A_HANDFUL

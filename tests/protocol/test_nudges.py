"""An ask that only says "look" and came before the body began is seen by that run; any other has a run of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob import Job, NotAChildError, RunningJob
from celery_sidejob.operations import runs
from celery_sidejob.store import jobs
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def family(stage: Stage, second_run: Callable[[RunningJob], Any]) -> tuple[Job, Job]:
    """A suspended parent whose next run does `second_run`, and its child, whose first run is owed."""

    def body(job: RunningJob) -> None:
        if job.run_no == 1:
            job.enqueue("stage.idle", child_name="only")
            job.suspend()
        second_run(job)

    parent = stage.job(body)
    assert stage.run(parent) == "suspended"
    child = parent.refresh().child("only")
    assert child is not None
    return parent, child


def status_after(stage: Stage, job: Job, between: Callable[[], Any]) -> str:
    """Have something happen between a run's claim and the beginning of its body; returns the status after the run."""
    hold = stage.claim(job)
    assert hold is not None
    between()
    stage.perform(hold)
    return str(job.refresh().status)


def test_a_childs_end_before_the_body_begins_needs_no_further_run(stage: Stage) -> None:
    seen: list[str] = []
    parent, child = family(stage, lambda job: seen.append(job.children["only"].status))
    parent.run()
    assert status_after(stage, parent, lambda: stage.run(child)) == "completed"
    assert seen == ["completed"]


def test_a_childs_end_after_the_body_began_is_not_seen_and_has_a_run_of_its_own(stage: Stage) -> None:
    seen: list[str] = []

    def second_run(job: RunningJob) -> None:
        stage.outside(lambda: stage.run(child))
        seen.append(job.children["only"].status)

    parent, child = family(stage, second_run)
    parent.run()
    assert stage.run(parent) == "queued"
    assert seen == ["queued"]


def test_after_a_checkpoint_the_children_are_read_anew(stage: Stage) -> None:
    seen: list[str] = []

    def second_run(job: RunningJob) -> None:
        stage.outside(lambda: stage.run(child))
        job.checkpoint()
        seen.append(job.children["only"].status)

    parent, child = family(stage, second_run)
    parent.run()
    stage.run(parent)
    assert seen == ["completed"]


def test_a_run_asked_for_before_the_body_begins_is_not_swallowed(stage: Stage) -> None:
    parent, child = family(stage, lambda job: None)
    parent.run()
    assert status_after(stage, parent, lambda: (stage.run(child), stage.sidejob.get(parent.id).run())) == "queued"


def test_a_packet_before_the_body_begins_is_read_by_this_run_alone(stage: Stage) -> None:
    read: list[Any] = []
    job = stage.job(lambda job: read.extend(job.input("a")))
    assert status_after(stage, job, lambda: stage.sidejob.get(job.id).input("a").write(1)) == "completed"
    assert read == [1]


def test_a_packet_that_comes_during_the_run_has_a_run_of_its_own(stage: Stage) -> None:
    job = stage.job(lambda job: stage.outside(lambda: stage.sidejob.get(job.id).input("a").write(1)))
    assert stage.run(job) == "queued"


def test_a_failed_run_satisfies_no_nudge(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        raise ValueError("whatever came")

    job = stage.job(body)
    assert status_after(stage, job, lambda: stage.sidejob.get(job.id).input("a").write(1)) == "queued"
    with pytest.raises(ValueError, match="whatever came"):
        raise stage.raised[job.id]


# -- very many children ------------------------------------------------------------------------------------------------


@pytest.fixture
def two_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one child is more than a run begins with reading."""
    monkeypatch.setattr(runs, "LOOK_MOST", 1)


def large_family(stage: Stage, second_run: Callable[[RunningJob], Any]) -> tuple[Job, Job]:
    """As `family`, with a second child that has ended."""
    parent, child = family(stage, second_run)
    stage.run(parent.enqueue("stage.idle", child_name="other"))
    return parent, child


@pytest.mark.usefixtures("two_are_many")
def test_very_many_children_are_not_read_unless_the_body_asks(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, _ = large_family(stage, lambda job: job.child("other"))

    def children(*_: Any) -> Any:
        raise AssertionError("all children were read")

    monkeypatch.setattr(jobs, "children", children)
    assert stage.run(parent) == "completed"


@pytest.mark.usefixtures("two_are_many")
def test_very_many_children_are_the_same_ones_until_the_first_commit(stage: Stage) -> None:
    seen: list[str] = []

    def second_run(job: RunningJob) -> None:
        for act in (lambda: None, lambda: stage.outside(lambda: stage.run(child)), job.checkpoint):
            act()
            seen.append(job.children["only"].status)

    parent, child = large_family(stage, second_run)
    assert stage.run(parent) == "queued"
    assert seen == ["queued", "queued", "completed"]


@pytest.mark.usefixtures("two_are_many")
def test_an_end_among_very_many_children_may_be_seen_and_has_a_run_all_the_same(stage: Stage) -> None:
    seen: list[str] = []

    def second_run(job: RunningJob) -> None:
        stage.outside(lambda: stage.run(child))
        seen.append(job.children["only"].status)

    parent, child = large_family(stage, second_run)
    assert stage.run(parent) == "queued"
    assert seen == ["completed"]


@pytest.mark.parametrize("most", [0, 10], ids=["later", "at once"])
def test_a_child_is_found_by_its_name_as_the_unit_leaves_the_family(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(runs, "LOOK_MOST", most)
    found: list[Any] = []

    def second_run(job: RunningJob) -> None:
        known = job.child("only")
        assert known is not None
        job.disown("only")
        new = job.enqueue("stage.idle", child_name="new")
        with pytest.raises(NotAChildError):
            job.disown("only")
        with pytest.raises(NotAChildError):
            job.disown(known)
        found.extend([job.child("only"), job.child("new") == new, job.child("nobody")])
        job.adopt(known, "again")
        found.append(job.child("again") == known)

    parent, _ = family(stage, second_run)
    parent.run()
    stage.run(parent)
    assert found == [None, True, None, True]
    assert set(parent.children) == {"again", "new"}

"""A run has the children of its claim: an end that it can see is one whose wake the claim has taken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from celery_sidejob import Job, NotAChildError, RunningJob
from celery_sidejob.operations.runs import runs
from celery_sidejob.store import jobs
from celery_sidejob.store.claims import Try
from tests.tools.crash_points import Arm, lost
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


@pytest.mark.parametrize("when", ["before the body begins", "during the run"])
def test_a_childs_end_since_the_claim_is_not_seen_and_has_a_run_of_its_own(stage: Stage, when: str) -> None:
    seen: list[str] = []

    def second_run(job: RunningJob) -> None:
        if when == "during the run" and not seen:
            stage.outside(lambda: stage.run(child))
        seen.append(job.children["only"].status)

    parent, child = family(stage, second_run)
    parent.run()
    between = (lambda: stage.run(child)) if when == "before the body begins" else lambda: None
    assert status_after(stage, parent, between) == "queued"
    assert stage.run(parent) == "completed"
    assert seen == ["queued", "completed"]


@pytest.mark.parametrize("tries", [1, 2])
def test_a_childs_end_that_a_claim_has_waited_for_is_taken_by_the_next_try_or_left(
    stage: Stage, at: Arm, aside: Callable[..., Future[Any]], monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """What the last try has waited for is left, and has a further run."""
    if tries == 1:
        monkeypatch.setattr(runs, "Try", SimpleNamespace(AT_ONCE=Try.LEAVING, LEAVING=Try.LEAVING))
    seen: list[str] = []
    parent, child = family(stage, lambda job: seen.append(job.children["only"].status))
    parent.run()
    of_child = stage.claim(child)
    assert of_child is not None
    claiming: list[Future[Any]] = []

    def parent_is_claimed() -> None:  # the child's end has the lock on its parent, and is not committed
        claiming.append(aside(stage.claim, parent))
        stage.wait_for_waiters()

    at("end:before-commit", parent_is_claimed)
    stage.perform(of_child)
    hold = claiming[0].result(10)
    left = {1: ("queued", 1), 2: ("running", 0)}[tries]
    assert stage.sql("SELECT status, wakes - wakes_taken FROM jobs WHERE id = %s", parent.id) == [left]
    assert hold.row.status == "running"
    assert stage.broken_rules() == []
    stage.perform(hold)
    stage.drain()
    assert parent.refresh().status == "completed"
    assert seen == {1: ["running", "completed"], 2: ["completed"]}[tries]


def test_a_claim_whose_answer_was_lost_takes_what_came_until_it_is_made_again(stage: Stage, at: Arm) -> None:
    seen: list[str] = []
    parent, child = family(stage, lambda job: seen.append(job.children["only"].status))
    parent.run()

    def answer_is_lost() -> None:
        stage.outside(lambda: stage.run(child))
        lost()

    at("claim:after-commit", answer_is_lost)
    assert stage.run(parent) == "completed"
    assert seen == ["completed"]


def test_a_forced_run_after_a_termination_outlives_a_claim_that_is_made_again(stage: Stage, at: Arm) -> None:
    job = stage.job()

    def answer_is_lost() -> None:
        other = stage.sidejob.get(job.id)
        other.terminate()
        stage.sql("INSERT INTO timers (job_id, due_at, ask, accepted) VALUES (%s, now(), 'force', true)", job.id)
        lost()

    at("claim:after-commit", answer_is_lost)
    assert stage.run(job) == "terminating"
    stage.drain()
    assert job.refresh().status == "completed"


def test_two_children_that_end_around_claims_are_added_up_once(stage: Stage) -> None:
    """The naive Fibonacci: it reads its children's outputs as soon as both have ended, without a look at who came."""
    sums: list[int] = []

    def add(job: RunningJob) -> None:
        if not job.children:
            for name in ("left", "right"):
                job.enqueue(stage.call, (number,), child_name=name)
            job.suspend()
        if any(child.status != "completed" for child in job.children.values()):
            job.suspend()
        sums.append(sum(child.output("value").read() for child in job.children.values()))

    def give(job: RunningJob) -> None:
        with stage.sidejob.port_options(notify=False):
            job.output("value").write(21)

    leaf = stage.job(give)
    (number,) = leaf.args
    parent = stage.job(add)
    stage.run(parent)
    left, right = (parent.refresh().child(name) for name in ("left", "right"))
    assert left is not None
    assert right is not None
    stage.run(left)
    assert status_after(stage, parent, lambda: stage.run(right)) == "queued"
    assert sums == []
    assert stage.run(parent) == "completed"
    assert sums == [42]


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


def test_a_packet_since_the_claim_may_be_read_by_this_run_and_costs_one_more(stage: Stage) -> None:
    read: list[Any] = []
    job = stage.job(lambda job: read.extend(job.input("a")))
    assert status_after(stage, job, lambda: stage.sidejob.get(job.id).input("a").write(1)) == "queued"
    assert read == [1]
    assert stage.run(job) == "completed"
    assert read == [1]


def test_a_packet_that_comes_during_the_run_has_a_run_of_its_own(stage: Stage) -> None:
    job = stage.job(lambda job: stage.outside(lambda: stage.sidejob.get(job.id).input("a").write(1)))
    assert stage.run(job) == "queued"


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

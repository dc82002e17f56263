"""An output port that several jobs read: each packet is taken by one, and is back if its unit does not commit."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob import Job, RunningJob, StoreUnavailableError
from celery_sidejob.operations.runs import recovery
from celery_sidejob.unit.open_unit import OpenUnit, within
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage


@pytest.fixture
def child(stage: Stage) -> Job:
    """A job with four packets on its output port, of which nobody was told."""
    made = stage.inside(lambda job: None)
    with stage.sidejob.port_options(notify=False):
        made.output("x").write_many([1, 2, 3, 4])
    return made


def test_two_runs_at_once_read_different_packets_and_neither_is_refused(stage: Stage, child: Job) -> None:
    seen: dict[str, list[Any]] = {"first": [], "second": []}

    def first(job: RunningJob) -> None:
        port = child.output("x")
        seen["first"].append(port.read())
        stage.outside(lambda: stage.run(other))
        seen["first"] += port
        job.checkpoint()

    def second(job: RunningJob) -> None:
        seen["second"] += child.output("x").read_many(2)

    other = stage.job(second)
    job = stage.job(first)
    assert stage.run(job) == "completed"
    assert seen == {"first": [1, 4], "second": [2, 3]}
    assert (job.info["run_no"], other.info["run_no"]) == (1, 1)


def test_what_a_lost_run_had_taken_is_read_after_it_by_another_and_in_order(stage: Stage, child: Job) -> None:
    job = stage.job()
    hold = stage.claim(job)
    assert hold is not None
    with within(OpenUnit(stage.runtime, hold)):
        assert child.output("x").read_many(2) == [1, 2]
    assert child.output("x").read_many(1) == [3], "what is taken is passed over"

    recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id, own=True)
    seen: list[Any] = []
    other = stage.inside(lambda job: seen.extend(child.output("x").read_many(9)))
    assert (other.status, seen) == ("completed", [1, 2, 4])


def test_a_unit_does_not_remove_what_another_run_has_taken_meanwhile_from_its_own_port(stage: Stage) -> None:
    """The owner reads ahead without a lock. Its unit is refused whole, and the packet is there for its next run."""
    seen: list[list[Any]] = []

    def body(job: RunningJob) -> None:
        seen.append([job.input("in").read()])
        job.output("copy").write(seen[-1][0])
        if len(seen) == 1:
            with within(OpenUnit(stage.runtime, hold)):
                assert owner.input("in").read_many(1) == [1]

    owner, other = stage.job(body), stage.job()
    with stage.sidejob.port_options(notify=False):
        owner.input("in").write_many([1, 2])
    hold = stage.claim(other)
    assert hold is not None

    stage.run(owner)
    assert (owner.refresh().status, list(owner.output("copy"))) == ("queued", [])
    assert len(owner.input("in")) == 1, "the other has the first"

    recovery.release(stage.runtime, other.id, run_no=hold.run_no, worker_id=hold.worker_id)
    stage.run(owner)
    assert (seen, list(owner.output("copy"))) == ([[1], [1]], [1])
    assert list(owner.input("in")) == [2]


def first_two(port: Any) -> list[Any]:
    return [value for _, value in zip(range(2), port, strict=False)]


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda port: [port.read()], [1]),
        (lambda port: port.read_many(2), [1, 2]),
        (first_two, [1, 2]),
        (lambda port: port.connect_to(port.job.input("y")), [1, 2, 3, 4]),
    ],
    ids=["one", "many", "each", "moved"],
)
def test_a_body_that_goes_on_after_a_lost_answer_reads_what_was_taken(
    stage: Stage, child: Job, at: Arm, read: Any, expected: list[int]
) -> None:
    seen: list[Any] = []

    def body(job: RunningJob) -> None:
        port = child.output("x")
        at("take:after-commit", lost)
        with pytest.raises(StoreUnavailableError):
            read(port)
        seen.extend(read(port))
        job.checkpoint()
        seen.extend(port.read_many(9))

    assert stage.inside(body).status == "completed"
    assert seen[: len(expected)] == expected
    assert seen == [1, 2, 3, 4]
    assert stage.sql("SELECT count(*) FROM packets WHERE taken_by IS NOT NULL") == [(0,)]


def test_what_was_taken_without_an_answer_is_free_after_the_run(stage: Stage, child: Job, at: Arm) -> None:
    def body(job: RunningJob) -> None:
        at("take:after-commit", lost)
        with pytest.raises(StoreUnavailableError):
            child.output("x").read_many(2)

    assert stage.inside(body).status == "completed"
    assert stage.sql("SELECT count(*) FROM packets WHERE taken_by IS NOT NULL") == [(0,)]
    assert child.output("x").read_many(9) == [1, 2, 3, 4]

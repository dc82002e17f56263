"""An ask that came before a run first looked at the store, and only said that there is something to see, is seen."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from tests.tools.in_process import Stage


def family(stage: Stage, second_run: Any) -> tuple[Job, Job]:
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


def test_a_childs_end_before_the_first_look_needs_no_further_run(stage: Stage) -> None:
    def second_run(job: RunningJob) -> None:
        stage.outside(lambda: stage.run(child))  # between this run's claim and its first look
        assert job.children["only"].status == "completed"

    parent, child = family(stage, second_run)
    parent.run()
    assert stage.run(parent) == "completed"
    assert parent.refresh().info["run_no"] == 2


def test_a_childs_end_after_the_first_look_has_a_run_of_its_own(stage: Stage) -> None:
    def second_run(job: RunningJob) -> None:
        assert job.children["only"].status == "queued"
        stage.outside(lambda: stage.run(child))

    parent, child = family(stage, second_run)
    parent.run()
    assert stage.run(parent) == "queued"


def test_a_run_asked_for_before_the_first_look_is_not_swallowed(stage: Stage) -> None:
    def second_run(job: RunningJob) -> None:
        stage.outside(lambda: (stage.run(child), stage.sidejob.get(job.id).run()))
        assert job.children["only"].status == "completed"

    parent, child = family(stage, second_run)
    parent.run()
    assert stage.run(parent) == "queued"


def test_a_packet_before_the_first_look_is_read_by_this_run_alone(stage: Stage) -> None:
    read: list[Any] = []

    def body(job: RunningJob) -> None:
        stage.outside(lambda: stage.sidejob.get(job.id).input("a").write(1))
        read.extend(job.input("a"))

    job = stage.job(body)
    assert stage.run(job) == "completed"
    assert read == [1]


def test_a_failed_run_satisfies_no_nudge(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        stage.outside(lambda: stage.sidejob.get(job.id).input("a").write(1))
        assert len(job.input("a")) == 1
        raise ValueError("after having looked")

    job = stage.job(body)
    with pytest.raises(ValueError, match="after having looked"):
        stage.run(job)
    assert job.refresh().status == "queued"

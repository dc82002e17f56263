"""An output port that several jobs read: each packet is taken by one, and is back if its unit does not commit."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob import Job, RunningJob
from celery_sidejob.operations import recovery
from celery_sidejob.unit.open_unit import OpenUnit, within
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

"""Interleavings by which SideJob loses data, held at crash points: at each instant another client does its part.

The others of its list that concern data are elsewhere: the claim beside a write in test_traces (P02), a run that goes
on when its lease has ended in test_fence, and children that end around their parent's claim in test_first_children.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from celery_sidejob import Job, RunningJob, StoreUnavailableError
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


@pytest.mark.parametrize("held_at", ["end:before-commit", "end:after-commit"])
@pytest.mark.parametrize("locks", [False, True], ids=["one_statement", "under_the_lock"])
def test_a_packet_written_as_a_run_ends_has_a_run(
    stage: Stage, at: Arm, aside: Callable[..., Future[Any]], held_at: str, locks: bool
) -> None:
    """WS-09: the run has read its status, a client writes, the run stores `completed`: nobody reads the packet."""
    read: list[Any] = []
    writes: list[Future[Any]] = []

    def body(job: RunningJob) -> None:
        read.extend(job.input("a"))
        if locks and job.run_no == 1:
            job.set(x=1)

    job = stage.job(body)

    def write() -> None:
        writes.append(aside(job.input("a").write, 1))
        if locks and held_at == "end:before-commit":
            stage.wait_for_waiters()
        else:
            writes[0].result(10)

    at(held_at, write)
    stage.run(job)
    writes[0].result(10)

    assert (read, job.refresh().status) == ([], "queued")
    stage.drain()
    assert (read, job.refresh().status) == ([1], "completed")


@pytest.mark.parametrize("held_at", ["publish:before-commit", "publish:after-commit"])
def test_a_port_that_subscribes_again_beside_a_publication_stays_subscribed(
    stage: Stage, at: Arm, held_at: str
) -> None:
    """WS-14: a publisher takes an old entry for obsolete, a client subscribes anew, the publisher removes the entry."""
    steady, again = (stage.job(inports={"in": {"channels": ["/news"]}}) for _ in range(2))
    stage.drain()
    again.input("in").channels = []

    def subscribe() -> None:
        stage.outside(lambda: setattr(again.input("in"), "channels", ["/news"]))

    at(held_at, subscribe)
    stage.sidejob.publish("/news/of/today", 1)
    assert stage.sidejob.publish("/news", 2) == 2

    assert (again.input("in").channels, waiting(steady)) == (["/news"], [1, 2])
    assert waiting(again) == [2], "the first message had its subscribers already"
    assert [str(job.refresh().status) for job in (steady, again)] == ["queued", "queued"]


@pytest.mark.parametrize("lost_at", ["publish:before-commit", "publish:after-commit"])
def test_a_store_that_is_away_during_a_publication_unsubscribes_nobody(stage: Stage, at: Arm, lost_at: str) -> None:
    """WS-15: an error of the connection is taken for a job that is gone, and its subscription is removed."""
    job = stage.job(inports={"in": {"channels": ["/news"]}})
    stage.drain()

    at(lost_at, lost)
    with pytest.raises(StoreUnavailableError):
        stage.sidejob.publish("/news", 1)

    assert job.input("in").channels == ["/news"]
    assert stage.sidejob.publish("/news", 2) == 1
    assert waiting(job) == ([2] if lost_at == "publish:before-commit" else [1, 2])


def waiting(job: Job) -> list[Any]:
    return [packet.value for packet in job.input("in").peek()]

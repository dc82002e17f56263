"""What a run has read is let go of with the run, and waits for no garbage collector: it may be megabytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from celery_sidejob import RunningJob
from tests.tools.in_process import Stage


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["completed", "suspended"])
def test_the_unit_of_a_run_goes_with_it(stage: Stage, how: str) -> None:
    units = []

    def body(job: RunningJob) -> None:
        units.append(weakref.ref(job._unit))
        assert list(job.input("a")) == ["big"]
        if how == "suspended":
            job.suspend()

    job = stage.job(body)
    job.input("a").write("big")
    assert stage.run(job) == how
    assert [unit() for unit in units] == [None]

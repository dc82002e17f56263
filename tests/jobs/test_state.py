"""The user's JSON on a job."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest

from celery_sidejob import InvalidValueError, JobNotFoundError, RunningJob
from tests.tools.in_process import Stage


def test_keys_are_set_and_unset_all_at_once(stage: Stage) -> None:
    job = stage.job(state={"given": None})
    assert job.set({"a b": 1, "": 2}, c=[1, {"d": None}], e=datetime(2026, 1, 1, tzinfo=UTC)) == job

    assert job.state == {
        "given": None, "a b": 1, "": 2, "c": [1, {"d": None}], "e": datetime(2026, 1, 1, tzinfo=UTC),
    }  # fmt: skip
    assert (job.get("c"), job.get("given", 5), job.get("nope"), job.get("nope", 5)) == ([1, {"d": None}], None, None, 5)
    assert job.unset("given", "nope", "c").state.keys() == {"a b", "", "e"}
    assert (job.set(), job.unset()) == (job, job)
    assert stage.sidejob.get(job.id).get("") == 2


def test_what_is_refused_changes_nothing(stage: Stage) -> None:
    job = stage.job(state={"a": 1})
    for bad in ({"a": 2, "b": float("inf")}, {"a": 2, "b": "x" * 1_100_000}, {"a": 2, "b\0": 1}, {"a": 2, 3: 1}):
        with pytest.raises(InvalidValueError):
            job.set(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError):
        stage.job(state={"x": object()})
    assert job.state == {"a": 1}
    assert stage.sidejob.count_jobs() == {"queued": 1}


def test_a_key_that_no_index_holds_is_refused(stage: Stage) -> None:
    job = stage.job()
    for key in ("k" * 256, "\ud800"):
        with pytest.raises(InvalidValueError, match="key of a job's state"):
            job.set({key: 1})
    job.set({"k" * 255: 1})


def test_the_state_of_a_job_that_is_gone(stage: Stage) -> None:
    job = stage.job()
    job.terminate()
    stage.drain()
    job.delete()
    with pytest.raises(JobNotFoundError):
        job.set(a=1)
    with pytest.raises(JobNotFoundError):
        job.unset("a")


def test_a_unit_reads_its_own_state_and_that_of_others(stage: Stage) -> None:
    other = stage.job(state={"x": 1, "y": 1})

    def body(job: RunningJob) -> None:
        job.set(a=1)
        job.set(a=2, b=1).unset("b").set(b=3)
        other.unset("x").set(y=2)
        assert (job.state, other.state, other.get("x"), other.get("y")) == ({"a": 2, "b": 3}, {"y": 2}, None, 2)

    job = stage.inside(body)
    assert (job.state, other.state) == ({"a": 2, "b": 3}, {"y": 2})


def test_writers_of_different_keys_do_not_lose_each_others(stage: Stage) -> None:
    job = stage.job()
    together = threading.Barrier(4)

    def write(name: str) -> None:
        together.wait()
        for n in range(10):
            job.set({name: n})

    threads = [threading.Thread(target=write, args=(f"k{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert job.state == {f"k{n}": 9 for n in range(4)}

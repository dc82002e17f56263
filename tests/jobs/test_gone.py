"""Whoever asks a handle of a deleted job is told so, whatever is asked; and where there is no lease to renew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_sidejob import IllegalMoveError, Job, JobNotFoundError, RunningJob, heartbeat
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct

READS: dict[str, Callable[[Job], Any]] = {
    "state": lambda job: job.state,
    "get": lambda job: job.get("key", 7),
    "children": lambda job: job.children,
    "child": lambda job: job.child("name"),
    "terminated": lambda job: job.terminated,
    "aliases": lambda job: job.aliases,
    "input": lambda job: job.input("a").read(),
    "output": lambda job: job.output("a").read(),
    "inports": lambda job: job.inports,
    "outports": lambda job: job.outports,
    "refresh": lambda job: job.refresh(),
}


def deleted(stage: Stage) -> Job:
    """A handle that has read its row, of a job that is gone since."""
    job = stage.sidejob.enqueue(stage.idle, state={"key": 1}, inports={"a": {}})
    assert job.refresh().status == "queued"
    stage.sidejob.get(job.id).terminate()
    stage.drain()
    assert stage.sidejob.get(job.id).delete()
    return job


@pytest.mark.parametrize("read", READS)
def test_a_deleted_job_is_not_found(stage: Stage, read: str) -> None:
    job = deleted(stage)
    with pytest.raises(JobNotFoundError, match=f"There is no job {job.id}"):
        READS[read](job)


@pytest.mark.parametrize("read", READS)
def test_also_inside_a_run(stage: Stage, read: str) -> None:
    job = deleted(stage)

    def body(running: RunningJob) -> None:
        with pytest.raises(JobNotFoundError, match=f"There is no job {job.id}"):
            READS[read](job)

    assert stage.inside(body).status == "completed"


def test_a_port_of_a_job_that_is_deleted_is_not_found(stage: Stage) -> None:
    job = stage.job()
    port = job.input("a")
    port.write(1)
    job.terminate()
    stage.drain()
    assert job.delete()
    for read in (port.read, port.peek, lambda: len(port), lambda: port.default):
        with pytest.raises(JobNotFoundError, match=f"There is no job {job.id}"):
            read()


def test_a_job_with_nothing_to_tell_is_found(stage: Stage) -> None:
    job = stage.job()
    assert (job.state, job.get("key", 7), job.children, job.child("name")) == ({}, 7, {}, None)
    assert (job.terminated, job.aliases, job.inports, job.outports) == (False, [], [], [])


def test_a_job_that_only_its_maker_sees_yet_is_found(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        child = job.enqueue(stage.idle, child_name="new")
        assert (child.state, child.children, child.aliases, child.terminated) == ({}, {}, [], False)
        assert (job.state, job.get("key", 7), job.terminated) == ({}, 7, False)

    stage.inside(body)
    engine = create_engine(direct(stage.database_url).replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session, session.begin():
        made = stage.sidejob.enqueue(stage.idle, transaction=session)
        assert (made.state, made.children, made.aliases, made.terminated) == ({}, {}, [], False)
        assert made.input("a").name == "a"
    engine.dispose()


def test_outside_of_a_run_there_is_no_lease_to_renew(stage: Stage) -> None:
    assert heartbeat()
    with pytest.raises(IllegalMoveError, match="outside of a run"):
        heartbeat(strict=True)

    def body(job: RunningJob) -> None:
        assert heartbeat(strict=True)
        with pytest.raises(IllegalMoveError, match="outside of a run"):
            stage.outside(lambda: heartbeat(strict=True))

    assert stage.inside(body).status == "completed"


def test_a_durable_task_that_runs_as_a_function_is_no_such_place(stage: Stage) -> None:
    def body() -> bool:
        return heartbeat(strict=True)

    task = stage.app.task(body, name="inline", durable=True, shared=False)
    stage.app.finalize()
    assert task()
    assert task.apply().get()

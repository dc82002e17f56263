"""What the result backend is given at an asking's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kombu.serialization import loads

from celery_sidejob import Job, RunningJob
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, recovery
from celery_sidejob.operations.runs.endings import Ending
from tests.tools.in_process import Stage

GIVEN = ([1], {"more": 2})


def body(job: RunningJob, one: int, more: int = 0) -> int:
    return one + more


def broken(job: RunningJob, one: int, more: int = 0) -> None:
    raise ValueError("broken")


def completed(stage: Stage) -> Job:
    return run(stage, stage.task(body, name="body").enqueue(*GIVEN))


def completed_below_a_parent(stage: Stage) -> Job:
    stage.task(body, name="body")
    return run(stage, stage.job().enqueue("body", *GIVEN, child_name="kid"))


def failed(stage: Stage) -> Job:
    return run(stage, stage.task(broken, name="broken").enqueue(*GIVEN))


def revoked(stage: Stage) -> Job:
    job = stage.task(body, name="body").enqueue(*GIVEN)
    hold = stage.claim(job)
    assert hold is not None
    error = endings.error_json("TaskRevokedError", "revoked", "celery_sidejob.hooks.errors")
    endings.end(stage.runtime, hold, None, Ending(RunEnd.FAILED, result=error, error=error), from_outside=True)
    return job


def given_up(stage: Stage) -> Job:
    job = stage.task(body, name="body", max_losses=1).enqueue(*GIVEN)
    hold = stage.claim(job)
    assert hold is not None
    stage.declare_dead(stage.worker_id)
    assert recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=stage.worker_id)
    return job


def run(stage: Stage, job: Job) -> Job:
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    return job


@pytest.mark.parametrize("end", [completed, completed_below_a_parent, failed, revoked, given_up])
def test_an_extended_result_has_the_arguments_whoever_ended_the_asking(
    stage: Stage, end: Callable[[Stage], Job]
) -> None:
    stage.app.conf.update(result_backend="cache+memory://", result_extended=True)
    result: Any = end(stage).refresh().result

    assert (result.args, result.kwargs) == GIVEN


def test_an_error_link_is_told_of_the_arguments(stage: Stage) -> None:
    told: list[Any] = []

    @stage.app.task(name="errback", shared=False)
    def errback(request: Any, error: BaseException, traceback: Any) -> None:
        told.append((request.args, request.kwargs))

    job = stage.task(broken, name="broken").enqueue(*GIVEN, link_error=errback.s())
    run(stage, job)

    assert told == [GIVEN]


def test_an_error_link_that_can_never_be_sent_has_no_other_repeated(stage: Stage) -> None:
    told: list[str] = []

    @stage.app.task(name="errback.told_once", shared=False)
    def errback(request: Any, error: BaseException, traceback: Any) -> None:
        told.append(request.id)

    @stage.app.task(name="unsendable", shared=False)
    def unsendable(task_id: str) -> None: ...

    stage.app.conf.task_create_missing_queues = False
    links = [unsendable.s().set(queue="nowhere"), errback.s()]
    job = stage.task(broken, name="broken.once").enqueue(*GIVEN, link_error=links)

    task_id = job.task_id
    run(stage, job)

    assert told == [task_id]
    assert stage.sql("SELECT count(*) FROM askings WHERE stored_at IS NULL") == [(0,)], "the sweeper tells it again"


LIKE_ENVELOPES = [{"__type__": "date", "__value__": "2026-11-28"}, {"a": ({"__value__": None, "__type__": {"b": 1}},)}]
READ = [LIKE_ENVELOPES[0], {"a": [{"__value__": None, "__type__": {"b": 1}}]}]


def test_a_value_that_looks_like_an_envelope_of_kombu_s_is_read_as_it_is(stage: Stage) -> None:
    """As a result, as the argument of a callback, and as an argument of a durable task."""
    stage.app.conf.update(result_backend="cache+memory://")
    told: list[Any] = []

    @stage.app.task(name="noted", durable=True, shared=False)
    def noted(value: Any) -> None:
        told.append(value)

    def likely(job: RunningJob) -> Any:
        return LIKE_ENVELOPES

    job = run(stage, stage.task(likely, name="likely").enqueue(link=noted.s()))

    assert job.refresh().result.get(timeout=5) == READ
    noted.delay(LIKE_ENVELOPES)
    bodies = stage.sql("SELECT body FROM messages WHERE task = 'noted'")
    assert [loads(bytes(body), "application/json", "utf-8")[0] for (body,) in bodies] == [[READ]] * 2


def test_what_the_backend_has_and_cannot_read_is_replaced(stage: Stage) -> None:
    stage.app.conf.update(result_backend="cache+memory://")
    job = stage.task(body, name="body").enqueue(*GIVEN)
    result: Any = job.result
    stage.app.backend.set(stage.app.backend.get_key_for_task(result.id), b"\x80\x04 a pickle")

    run(stage, job)

    assert result.state == "SUCCESS"
    assert stage.sql("SELECT count(*) FROM askings WHERE stored_at IS NULL") == [(0,)], "the sweeper tells it again"

"""Batches: sets of jobs and durable tasks, their progress, and what follows when all have ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from celery_sidejob import (
    Batch,
    BatchClosedError,
    BatchCounts,
    BatchNotFoundError,
    IllegalMoveError,
    InvalidValueError,
    RunningJob,
    StoreUnavailableError,
    UnknownTaskError,
)
from celery_sidejob.jobs.batch import settle, settle_all
from celery_sidejob.model.crash_points import Died
from celery_sidejob.testing import run_job, run_until_quiet
from tests.tools.apps import make_app
from tests.tools.crash_points import Arm, lost
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def fails(job: RunningJob) -> None:
    raise ValueError("it does not work")


def idle() -> None:
    """Do nothing."""


class Followed:
    """What has followed batches, in its order."""

    def __init__(self, stage: Stage) -> None:
        self.told: list[str] = []

        def tell(job: RunningJob, what: str) -> None:
            self.told.append(what)

        def tell_durably(what: str) -> None:
            self.told.append(what)

        self.job = stage.task(tell, name="stage.tell")
        self.durable = stage.app.task(tell_durably, name="stage.tell_durably", durable=True, shared=False)

    def calls(self) -> dict[str, Any]:
        return {f"on_{what}": self.job.s(what) for what in ("complete", "success", "failure")}


def work_of(stage: Stage, *, error: bool = False) -> Any:
    """A durable task that works, or does not."""

    def work() -> None:
        if error:
            raise ValueError("it does not work")

    return stage.app.task(work, name=f"stage.work_{error}", durable=True, shared=False)


def quiet(stage: Stage) -> None:
    run_until_quiet(stage.sidejob, raise_errors=False)


@pytest.mark.parametrize("how", ["well", "job fails", "task fails", "terminated"])
def test_what_follows_is_made_when_all_have_ended(stage: Stage, how: str) -> None:
    followed = Followed(stage)
    with stage.sidejob.batch("import", **followed.calls()) as batch:
        first = stage.job(fails if how == "job fails" else None)
        second = stage.job(countdown=3600)
        work_of(stage, error=how == "task fails").delay()
    assert (batch.counts, batch.progress) == (BatchCounts(3, 0, 0, 0), 0.0)
    quiet(stage)
    assert (batch.counts.done, batch.counts.open, round(batch.progress, 2)) == (2, 1, 0.67)
    assert (followed.told, batch.ended_at) == ([], None)
    if how == "terminated":
        second.terminate(without_shutdown=True)
    stage.sql("UPDATE timers SET due_at = now()")
    quiet(stage)
    assert followed.told == ["complete", "success" if how == "well" else "failure"]
    assert (batch.progress, batch.ended_at is not None, batch.jobs) == (1.0, True, [first, second])
    failed, terminated = how in ("job fails", "task fails"), how == "terminated"
    assert batch.counts == BatchCounts(3, 3 - failed - terminated, int(failed), int(terminated))
    settle_all(stage.runtime)
    quiet(stage)
    assert len(followed.told) == 2


def test_a_durable_task_can_follow_and_is_told_once(stage: Stage) -> None:
    followed = Followed(stage)
    with stage.sidejob.batch("import", on_success=followed.durable.s("done")):
        stage.job()
    quiet(stage)
    assert followed.told == ["done"]


def test_an_empty_batch_ends_when_it_is_closed(stage: Stage) -> None:
    followed = Followed(stage)
    batch = stage.sidejob.batch("import", **followed.calls())
    settle_all(stage.runtime)
    assert (batch.progress, batch.ended_at) == (0.0, None)
    batch.close()
    quiet(stage)
    assert (followed.told, batch.progress) == (["complete", "success"], 1.0)


def test_an_open_batch_takes_more_by_its_name(stage: Stage) -> None:
    batch = stage.sidejob.batch("import", on_complete=stage.idle)
    elsewhere, called = stage.job(), work_of(stage).delay()
    batch.add(elsewhere, called)
    batch.add(elsewhere)
    quiet(stage)
    assert (batch.counts, batch.ended_at) == (BatchCounts(2, 2, 0, 0), None)
    with stage.sidejob.batch("import") as again:
        stage.job()
    assert again.counts.total == 3
    with pytest.raises(BatchClosedError, match="Batch 'import' is closed: nothing"):
        batch.add(stage.job())
    with pytest.raises(BatchClosedError, match="is closed, and has not ended"):
        stage.sidejob.batch("import")
    quiet(stage)
    assert stage.sidejob.get_batch("import").ended_at is not None
    stage.sidejob.batch("import")
    assert [one.counts.total for one in stage.sidejob.batches()] == [0]
    with pytest.raises(BatchNotFoundError, match="replaced by another"):
        batch.progress  # noqa: B018 - it raises


def test_a_call_into_a_batch_that_was_closed_keeps_nothing(stage: Stage) -> None:
    work = work_of(stage)
    batch = stage.sidejob.batch("import")
    batch.close()
    stage.runtime.connections.write_behind_now()
    before = stage.everything()
    with stage.connect(autocommit=False) as connection, batch_block(batch):
        for transaction in ({}, {"transaction": connection}):
            for call in (
                partial(work.apply_async, **transaction), partial(work.apply_async, unique="k", **transaction),
                partial(stage.sidejob.send_many, [work.s(), work.s()], **transaction),
                partial(stage.sidejob.enqueue, stage.idle, **transaction),
            ):  # fmt: skip
                with pytest.raises(BatchClosedError, match="Batch 'import' is closed: nothing"):
                    call()
        connection.commit()
    assert stage.everything() == before


def test_a_call_whose_answer_was_lost_belongs_to_its_batch_once(stage: Stage, at: Arm) -> None:
    work = work_of(stage)
    with stage.sidejob.batch("import") as batch:
        at("durable-keep:after-commit", lost)
        work.delay()
        at("durable-keep:after-commit", lost)
        stage.sidejob.send_many([work.s(), work.s()])
    assert (batch.counts.total, stage.row_counts()["messages"]) == (3, 3)


def test_a_call_into_a_batch_is_not_published_without_its_row(stage: Stage) -> None:
    batch = stage.sidejob.batch("import")
    app = make_app("away", sidejob_database_url="postgresql://127.0.0.1:1/nowhere", sidejob_on_store_down="publish")
    work = app.task(idle, name="away.work", durable=True, shared=False)
    with batch_block(batch):
        for call in (work.delay, partial(app.sidejob.send_many, [work.s()])):
            with pytest.raises(StoreUnavailableError):
                call()
    app.sidejob.close()
    app.close()


def test_an_error_in_the_block_leaves_the_batch_open(stage: Stage) -> None:
    batch = stage.sidejob.batch("import", on_complete=stage.idle)

    def block() -> None:
        with batch:
            stage.job()
            raise KeyError

    with pytest.raises(KeyError):
        block()
    quiet(stage)
    assert (batch.closed, batch.ended_at, batch.counts.done) == (False, None, 1)
    stage.job()
    assert batch.counts.total == 1, "the block is over"
    batch.delete()
    with pytest.raises(BatchNotFoundError, match="never opened, or was deleted"):
        stage.sidejob.get_batch("import")


def test_a_run_fills_a_batch_with_its_commit(stage: Stage) -> None:
    followed, work = Followed(stage), work_of(stage)

    def body(job: RunningJob) -> None:
        with stage.sidejob.batch("import", on_success=followed.job.s("done")) as batch:
            first = stage.sidejob.enqueue(stage.idle)
            batch.add(first, stage.sidejob.enqueue(stage.idle))
            work.delay()
        with pytest.raises(IllegalMoveError, match="would block its worker"):
            batch.wait()
        if not job.get("again"):
            stage.outside(lambda: settle(stage.runtime, batch._id))
            raise job.retry(countdown=0)

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    batch = stage.sidejob.get_batch("import")
    assert (batch.closed, batch.counts.total) == (False, 1), "durable tasks are called at once, whatever the run does"
    job.set(again=True)
    quiet(stage)
    assert (batch.ended_at is not None, followed.told, batch.counts) == (True, ["done"], BatchCounts(4, 4, 0, 0))


def test_the_callers_transaction_decides(stage: Stage) -> None:
    work = work_of(stage)
    batch = stage.sidejob.batch("import")
    with stage.connect(autocommit=False) as connection, batch:
        stage.sidejob.enqueue(stage.idle, transaction=connection)
        work.apply_async(transaction=connection)
        stage.sidejob.send_many([work.s(), work.s()], transaction=connection)
        connection.rollback()
        assert batch.counts.total == 0
        stage.sidejob.enqueue(stage.idle, transaction=connection)
        stage.sidejob.send_many([work.s(), work.s()], transaction=connection)
        connection.commit()
    assert batch.counts.total == 3


def test_who_closes_waits_for_who_is_adding(stage: Stage, aside: Callable[..., Future[Any]]) -> None:
    followed = Followed(stage)
    batch = stage.sidejob.batch("import", **followed.calls())
    with stage.connect(autocommit=False) as connection:
        with batch_block(batch):
            stage.sidejob.enqueue(stage.idle, transaction=connection)
        closing = aside(batch.close)
        stage.wait_for_waiters()
        settle_all(stage.runtime)
        connection.commit()
    closing.result(10)
    assert (batch.counts.total, batch.ended_at) == (1, None)
    quiet(stage)
    assert followed.told == ["complete", "success"]


def batch_block(batch: Batch) -> Any:
    """The block of a batch that stays open."""
    from celery_sidejob.operations.changes import batches

    return batches.within(batch._id)


@pytest.mark.parametrize("point", ["batch:before-commit", "batch:after-commit"])
def test_what_follows_is_made_once_whoever_dies(stage: Stage, at: Arm, point: str) -> None:
    followed = Followed(stage)
    with stage.sidejob.batch("import", **followed.calls()) as batch:
        job = stage.job()
    stage.run(job)

    def die() -> None:
        raise Died

    settle_points = 0
    while batch.ended_at is None:
        at(point, die)
        with pytest.raises(Died):
            settle(stage.runtime, batch._id)
        settle_points += 1
        at(point, lambda: None)
        settle(stage.runtime, batch._id)
    quiet(stage)
    assert followed.told == ["complete", "success"]
    assert settle_points


def test_two_sweepers_make_what_follows_once(stage: Stage, at: Arm, aside: Callable[..., Future[Any]]) -> None:
    followed = Followed(stage)
    with stage.sidejob.batch("import", **followed.calls()) as batch:
        pass
    others: list[Any] = []
    at("batch:before-commit", lambda: at("batch:before-commit", lambda: others.append(both())))

    def both() -> bool:
        return bool(aside(settle, stage.runtime, batch._id).result(10))

    assert settle(stage.runtime, batch._id)
    assert others == [False]
    quiet(stage)
    assert followed.told == ["complete", "success"]


def test_more_members_than_a_page(stage: Stage) -> None:
    with stage.sidejob.batch("import", on_success=stage.idle) as batch:
        stage.sidejob.enqueue_many([{"task": stage.idle}] * 1200)
    stage.sql("UPDATE jobs SET status = 'completed'; DELETE FROM messages")
    assert settle(stage.runtime, batch._id)
    assert batch.counts == BatchCounts(1200, 1200, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.sidejob.batch("x", on_success=7), "on_success= takes a task or a signature of one task, not 7"),
        (lambda s: s.sidejob.batch("x", on_success=s.idle.s() | s.idle.s()), "signature of one task"),
        (lambda s: s.sidejob.batch("x", on_success=s.idle.s().set(link=s.idle.s())), "not with link"),
        (lambda s: s.sidejob.batch(7), "name"),
        (lambda s: s.sidejob.batch("y").add("me"), r"add\(\) takes jobs and the results of calls"),
        (lambda s: s.sidejob.batch("y").wait(timeout="soon"), "timeout= takes seconds"),
    ],
)
def test_what_is_no_batch_is_refused(stage: Stage, call: Callable[[Stage], Any], message: str) -> None:
    stage.sidejob.batch("y")
    before = stage.everything()
    with pytest.raises(InvalidValueError, match=message):
        call(stage)
    assert stage.everything() == before


def test_what_follows_is_checked_as_a_call(stage: Stage) -> None:
    with pytest.raises(TypeError, match="too many positional"):
        stage.sidejob.batch("x", on_complete=stage.idle.s(1))
    with pytest.raises(UnknownTaskError, match="no\\.such"):
        stage.sidejob.batch("x", on_complete="no.such")
    stage.sidejob.batch("x", on_complete=stage.idle.s().set(queue="later", priority=3, countdown=60))
    with pytest.raises(InvalidValueError, match="open with other calls"):
        stage.sidejob.batch("x", on_complete=stage.idle)
    assert stage.row_counts()["jobs"] == 0


def test_what_a_member_makes_is_no_member_even_if_it_runs_in_the_block(stage: Stage) -> None:
    made: list[Any] = []
    with stage.sidejob.batch("import") as batch:
        job = stage.job(lambda job: made.append(stage.sidejob.enqueue(stage.idle)))
        run_job(job)
    assert (batch.jobs, len(made)) == ([job], 1)


def test_its_jobs_are_found_among_others(stage: Stage) -> None:
    with stage.sidejob.batch("import") as batch:
        first, tagged = stage.job(unique="one"), stage.job(tags=["a"], queue="q")
    outside = stage.job(tags=["a"], queue="q")
    stage.sidejob.batch("empty")
    assert stage.sidejob.jobs(batch=batch) == stage.sidejob.jobs(batch="import") == [first, tagged]
    assert stage.sidejob.jobs(batch="import", unique="one") == [first]
    assert stage.sidejob.jobs(batch="empty", unique="one") == stage.sidejob.jobs(batch="empty") == []
    for also in ({"tag": "a"}, {"queue": "q"}, {"queue": "q", "status": "queued"}):
        assert stage.sidejob.jobs(batch="import", **also) == [tagged], also
    for job in (first, tagged, outside):
        stage.claim(job)
    assert stage.sidejob.jobs(batch="import", tag="a", status="running") == [tagged]
    with pytest.raises(BatchNotFoundError, match="'none'"):
        stage.sidejob.jobs(batch="none")


def test_wait_returns_when_it_has_ended(stage: Stage) -> None:
    with stage.sidejob.batch("import") as batch:
        job = stage.job()
    with pytest.raises(TimeoutError, match="has not ended after 0"):
        batch.wait(timeout=0)
    stage.run(job)
    settle_all(stage.runtime)
    assert batch.wait(timeout=5) is batch

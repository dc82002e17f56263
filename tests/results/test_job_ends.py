"""A job's result, and the count of a chord's part, are written by the commit that ends the asking, whoever ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import psycopg
import pytest
from celery import chord, states

from celery_sidejob import Job, RunningJob
from celery_sidejob.model.crash_points import Died
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, recovery, run_pages, terminations
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.results import waiting
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.heartbeat.run_ends import QuietEnd
from celery_sidejob.services.sweep.sweeper import Sweeper
from celery_sidejob.store import results
from celery_sidejob.store.claims import Owed
from celery_sidejob.store.connection.own_executor import OwnExecutor
from celery_sidejob.store.errors import RowsLocked
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage
from tests.tools.pgbouncer import direct
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import patient, wait_until

pytestmark = KOMBU_5_7

End = Callable[[Stage, Job], object]


@pytest.fixture
def stage(database_url: str) -> Iterator[Stage]:
    """An app whose store is its broker and has its results; its jobs run when the test says so."""
    made = Stage(database_url, broker="sidejobpg://", result_backend="sidejobpg://")
    yield made
    assert made.broken_rules() == []
    made.close()


def _body(job: RunningJob, number: int) -> int:
    if number < 0:
        raise ValueError(f"number {number}")
    if number == 0:
        job.terminate()
        raise job.retry(countdown=0)
    return number


def _total(numbers: list[int]) -> int:
    return sum(numbers)


def _task(stage: Stage) -> Any:
    return stage.task(_body, name="number", max_losses=1)


def die() -> None:
    raise Died


def completed(stage: Stage, job: Job) -> None:
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)


def ended_by_the_worker(stage: Stage, job: Job) -> None:
    """Its process was stopped by a time limit, or the asking was revoked."""
    hold = stage.claim(job)
    assert hold is not None
    error = endings.error_json("TaskRevokedError", "revoked", "celery_sidejob.hooks.errors")
    endings.end(stage.runtime, hold, None, Ending(RunEnd.FAILED, result=error, error=error), from_outside=True)


def terminated(stage: Stage, job: Job) -> None:
    job.terminate()
    completed(stage, job)


def terminated_without_shutdown(stage: Stage, job: Job) -> None:
    terminations.terminate_without_shutdown(stage.runtime, job.id, recursive=False)


def given_up(stage: Stage, job: Job) -> None:
    """Its worker has died, and this was one loss too many."""
    hold = stage.claim(job)
    assert hold is not None
    stage.declare_dead(stage.worker_id)
    stage.worker_id = stage.new_worker()
    recovery.rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=hold.worker_id)


ENDS = [
    (completed, 1, "end", states.SUCCESS),
    (completed, -1, "end", states.FAILURE),
    (completed, 0, "end", states.REVOKED),
    (ended_by_the_worker, 1, "end", states.REVOKED),
    (terminated, 1, "end", states.REVOKED),
    (terminated_without_shutdown, 1, "end", states.REVOKED),
    (given_up, 1, "rescue", states.FAILURE),
]


def _facts(stage: Stage, task_id: str) -> dict[str, Any]:
    """Whether the asking is closed, and whether its result, and the count of its part, are there."""
    (closed,) = stage.sql(
        "SELECT closed_at IS NOT NULL, stored_at IS NOT NULL FROM askings WHERE task_id = %s", task_id
    )
    kept = [state for (state,) in stage.sql("SELECT state FROM results WHERE key = %s", f"task:{task_id}")]
    counted = [part for (part,) in stage.sql("SELECT task_id FROM chord_parts")]
    return {"closed": closed, "kept": kept, "counted": counted}


@pytest.mark.parametrize("is_part", [False, True], ids=["alone", "part"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("end", "number", "point", "state"), ENDS)
def test_a_death_around_the_commit_that_ends_an_asking(
    stage: Stage, at: Arm, end: End, number: int, point: str, state: str, when: str, is_part: bool
) -> None:
    task, total = _task(stage), stage.app.task(_total, name="total", shared=False)
    if is_part:
        group = chord([task.s(number), task.s(7)])(total.s()).parent
        job = stage.sidejob.for_task_id(group.results[0].id)
    else:
        job = task.enqueue((number,))
    task_id = job.task_id

    at(f"{point}:{when}-commit", die)
    with suppress(Died):
        end(stage, job)
        pytest.fail("the point was not reached")

    facts = _facts(stage, task_id)
    if when == "before":
        assert facts == {"closed": (False, False), "kept": [], "counted": []}
        return
    assert facts == {"closed": (True, True), "kept": [state], "counted": [task_id] * is_part}
    assert job.refresh().exists


class Dying:
    """This process dies before the n-th statement of its work on a connection of the package."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = inf
        self.reached = 0
        """How many statements the last work came to."""
        for name in ("run", "_command"):
            monkeypatch.setattr(OwnExecutor, name, self._counted(getattr(OwnExecutor, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        worker = threading.get_ident()

        def counted(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != worker:  # a service's
                return call(*args, **options)
            self._left -= 1
            self.reached += 1
            if self._left == 0:
                raise Died
            return call(*args, **options)

        return counted

    def dies(self, before: int, work: Callable[[], object]) -> bool:
        """Do it, unless it dies before that statement; tell whether it has died."""
        self._left, self.reached = before, 0
        try:
            work()
        except Died:
            return True
        finally:
            self._left = inf
        return False


@pytest.mark.parametrize(("end", "number", "point", "state"), ENDS)
def test_a_death_at_each_statement_of_an_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, end: End, number: int, point: str, state: str
) -> None:
    task, total = _task(stage), stage.app.task(_total, name="total", shared=False)
    dying, seen = Dying(monkeypatch), []
    has_died, before = True, 0
    while has_died:
        before += 1
        stage.worker_id = stage.new_worker()
        group = chord([task.s(number), task.s(7)])(total.s()).parent
        task_id = group.results[0].id
        job = stage.sidejob.for_task_id(task_id)
        assert job is not None
        has_died = dying.dies(before, partial(end, stage, job))
        facts = _facts(stage, task_id)
        stage.sql("DELETE FROM chord_parts")
        seen.append(facts["closed"][0])
        done = {"closed": (True, True), "kept": [state], "counted": [task_id]}
        assert facts == (done if seen[-1] else {"closed": (False, False), "kept": [], "counted": []}), before
    assert seen == sorted(seen)
    assert {*seen} == {False, True}


@pytest.mark.parametrize("dies", [False, True])
def test_an_error_link_is_called_after_the_commit_and_finds_the_result(stage: Stage, at: Arm, dies: bool) -> None:
    told: list[Any] = []

    def errback(request: Any, error: Any, trace: Any) -> None:
        told.append((request.id, stage.app.AsyncResult(request.id).state))

    link = stage.app.task(errback, name="errback", shared=False).s()
    job = _task(stage).enqueue((-1,), link_error=link)
    task_id = job.task_id

    if dies:
        at("end:after-commit", die)
    with suppress(Died):
        completed(stage, job)
    assert _facts(stage, task_id)["kept"] == [states.FAILURE]
    if dies:
        assert (told, _facts(stage, task_id)["closed"]) == ([], (True, False))
        stage.sql("UPDATE askings SET closed_at = closed_at - interval '1 min'")
        Sweeper(stage.runtime).run_once()
    assert (told, _facts(stage, task_id)["closed"]) == ([(task_id, states.FAILURE)], (True, True))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_death_around_the_commit_of_a_page(stage: Stage, at: Arm, when: str) -> None:
    job = stage.task(_body, name="numbers").enqueue((1,))
    hold, task_id = stage.claim(job, in_page=True), job.task_id
    assert hold is not None
    over = stage.leave(hold)
    assert len(over) == 1
    at(f"claim-page:{when}-commit", die)
    with pytest.raises(Died):
        run_pages.claim_page(stage.runtime, (), worker_id=stage.worker_id, over=over)
    is_over = when == "after"
    facts = {"closed": (is_over, is_over), "kept": [states.SUCCESS] * is_over, "counted": []}
    assert _facts(stage, task_id) == facts


def test_results_of_a_page_are_kept_with_their_ends(stage: Stage) -> None:
    def long(job: RunningJob, number: int) -> str:
        return "x" * number

    task = stage.task(long, name="long")
    small, _, asked = jobs = [task.enqueue((number,)) for number in (3, results.SMALL_BYTES, 4)]
    task_ids = [job.task_id for job in jobs]
    holds = [stage.claim(job, in_page=True) for job in jobs]
    told = [over for hold in holds if hold is not None for over in stage.leave(hold)]
    assert [over.run[0] for over in told] == [small.id, asked.id], "its own process keeps the large one"
    asked.run()

    run_pages.claim_page(stage.runtime, (), worker_id=stage.worker_id, over=told)

    kept = [_facts(stage, task_id)["kept"] for task_id in task_ids]
    assert kept == [[states.SUCCESS], [states.SUCCESS], []]
    assert [stage.app.AsyncResult(task_id).result for task_id in task_ids[:2]] == ["xxx", "x" * results.SMALL_BYTES]
    assert stage.sql("SELECT result FROM askings WHERE task_id = %s", task_ids[0]) == [("xxx",)]
    assert holds[2] is not None
    run_pages.end_alone(stage.runtime, holds[2], told[1].run[2], is_unknown=False)
    assert stage.app.AsyncResult(task_ids[2]).result == "xxxx"
    assert asked.refresh().status == "queued"


LOCKS = {
    "updated": "UPDATE results SET state = state WHERE key = %s",
    "made": "INSERT INTO results (key, state, body) VALUES (%s, 'STARTED', '')",
}


@pytest.mark.parametrize("how", LOCKS)
def test_an_end_waits_for_its_locked_result_and_keeps_nothing_else_waiting(stage: Stage, how: str) -> None:
    task = stage.task(_body, name="numbers")
    heartbeat = Heartbeat(stage.runtime)
    worker = heartbeat.register()
    stuck, free, next_one = jobs = [task.enqueue((number,)) for number in (1, 2, 3)]
    ids = {job: job.task_id for job in jobs}
    for job in (stuck, free):
        hold = stage.claim(job, worker_id=worker, in_page=True)
        assert hold is not None
        [told] = stage.leave(hold)
        heartbeat.jobs.ends.add(QuietEnd(told, lambda hold=hold: hold))  # type: ignore[misc]
    if how == "updated":
        stage.sql("INSERT INTO results (key, state, body) VALUES (%s, 'PROGRESS', '')", f"task:{ids[stuck]}")
    bounded = f"-c search_path={stage.sidejob.settings.schema} -c idle_in_transaction_session_timeout=5s"
    with psycopg.connect(direct(stage.database_url), options=bounded) as user:
        user.execute(LOCKS[how], [f"task:{ids[stuck]}"])
        assert heartbeat.jobs.claim([Owed(next_one.id, 1, next_one.task)]).keys() == {(next_one.id, 1)}
        with pytest.raises(RowsLocked):
            heartbeat.errands.run_once()
        assert [_facts(stage, ids[job])["closed"][0] for job in (stuck, free)] == [False, True]
        assert user.execute("SELECT 1").fetchone(), "nothing has waited until this transaction was ended"
        user.rollback()
    heartbeat.errands.run_once()
    assert _facts(stage, ids[stuck])["kept"] == [states.SUCCESS]
    heartbeat.leave()
    heartbeat.close()


@pytest.mark.parametrize("options", [{}, {"ignore_result": True}])
def test_the_end_of_a_job_is_one_statement(stage: Stage, monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    job = stage.task(_body, name="counted", **options).enqueue((1,))
    hold = stage.claim(job)
    assert hold is not None
    commits: list[str] = []
    in_transaction = OwnExecutor.in_transaction

    def noted(executor: OwnExecutor, name: str, work: Any, **options: Any) -> Any:
        commits.append(name)
        return in_transaction(executor, name, work, **options)

    monkeypatch.setattr(OwnExecutor, "in_transaction", noted)
    dying = Dying(monkeypatch)
    assert not dying.dies(100, partial(stage.perform, hold))
    assert (commits, dying.reached) == (["end"], 1)


@pytest.mark.parametrize("dies", [False, True])
def test_a_unit_in_the_caller_s_transaction_writes_no_result(stage: Stage, at: Arm, dies: bool) -> None:
    stage.sql("CREATE TABLE shipped (number int)")
    seen: list[Any] = []

    def body(job: RunningJob) -> int:
        with stage.connect(autocommit=False) as connection:
            with job.unit(transaction=connection):
                connection.execute("INSERT INTO shipped VALUES (1)")
            connection.commit()
        seen.append(_facts(stage, job.task_id))
        return 7

    job = stage.job(body)
    result, task_id = stage.app.AsyncResult(job.task_id), job.task_id
    if dies:
        at("end:before-commit", die)
        with suppress(Died):
            stage.run(job)
        assert (result.state, stage.sql("SELECT * FROM shipped")) == (states.PENDING, [(1,)])
        recovery.rescue(stage.runtime, job.id, run_no=1, worker_id=stage.worker_id, own=True)
    stage.run(job)
    assert (result.get(timeout=5), _facts(stage, task_id)["closed"]) == (7, (True, True))
    assert seen == [{"closed": (False, False), "kept": [], "counted": []}] * len(seen)


def test_states_of_a_job_s_own_and_its_progress_are_shown_until_it_ends(stage: Stage) -> None:
    seen: list[Any] = []

    def body(task: Any, job: RunningJob) -> int:
        result: Any = job.result
        for tell in (
            lambda: task.update_state(state="HALF", meta={"done": 0.5}),
            lambda: job.progress(3, 4, "page 3"),
        ):
            tell()
            seen.append((result.state, result.info))
        return 7

    job = stage.task(body, name="telling", bind=True).enqueue()
    result: Any = job.result
    stage.run(job)
    assert seen == [("HALF", {"done": 0.5}), ("PROGRESS", {"current": 3, "total": 4, "note": "page 3"})]
    assert (result.state, result.result) == (states.SUCCESS, 7)


def test_the_process_that_ends_the_last_part_sends_the_body(stage: Stage) -> None:
    task, total = _task(stage), stage.app.task(_total, name="total", shared=False)
    group = chord([task.s(1), task.s(7)])(total.s()).parent
    for part in group.results:
        assert not stage.sql("SELECT 1 FROM broker_messages WHERE headers::json->>'task' = 'total'")
        completed(stage, stage.sidejob.for_task_id(part.id))
    assert stage.sql("SELECT 1 FROM broker_messages WHERE headers::json->>'task' = 'total'")


def test_a_caller_that_waits_is_told_of_the_end(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BACK_OFF_S", (3600.0,))
    job, got = _task(stage).enqueue((7,)), list[Any]()
    result, listening = stage.app.AsyncResult(job.task_id), stage.app.backend.place.ear
    threading.Thread(target=lambda: got.append(result.get(timeout=patient(10))), daemon=True).start()
    wait_until(lambda: listening.listens and any(wait.keys for wait in [*listening._waits]), message="the caller")
    completed(stage, job)
    wait_until(lambda: got, message="the result")
    assert got == [7]


def test_nothing_is_left_for_the_sweeper(stage: Stage) -> None:
    job = _task(stage).enqueue((1,))
    result = stage.app.AsyncResult(job.task_id)
    completed(stage, job)
    assert (result.get(timeout=5), stage.sql("SELECT 1 FROM askings WHERE stored_at IS NULL")) == (1, [])

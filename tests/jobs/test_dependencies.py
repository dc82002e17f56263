"""Jobs that wait until others have completed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from celery_sidejob import (
    CapacityPool,
    CycleError,
    DependencyFailedError,
    HasDependentsError,
    IllegalMoveError,
    InvalidValueError,
    Job,
    JobNotFoundError,
    RunningJob,
)
from celery_sidejob.inspection.jobs import JobViews
from celery_sidejob.model.crash_points import Died
from celery_sidejob.operations.changes import dependencies as operations
from celery_sidejob.operations.changes.follow_up import apply_due_timers
from celery_sidejob.operations.runs.recovery import rescue
from tests.jobs.test_queue import QUEUE, taken
from tests.tools.between import between_look_and_lock
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too

Aside = Callable[..., Future[Any]]


def fails(job: RunningJob) -> None:
    raise ValueError("it does not work")


def is_free(job: Job) -> bool:
    return job.refresh().waiting_for == []


def blocked(stage: Stage, *on: Job, **options: Any) -> Job:
    """A job that waits for these, and whose edges are confirmed."""
    job = stage.job(depends_on=on, **options)
    assert stage.claim(job) is None
    return job


# -- waiting and being freed -------------------------------------------------------------------------------------------


def test_a_job_begins_when_the_last_of_those_it_depends_on_has_completed(stage: Stage) -> None:
    first, second = stage.job(), stage.job()
    waits = blocked(stage, first, second)
    assert (str(waits.status), waits.waiting_for) == ("queued", ["dependencies"])
    assert (waits.dependencies, first.dependents) == ([first, second], [waits])
    stage.run(second)
    assert (waits.refresh().waiting_for, waits.dependencies) == (["dependencies"], [first])
    assert stage.claim(waits) is None
    stage.run(first)
    assert (waits.dependencies, first.dependents) == ([], [])
    assert stage.run(waits) == "completed"
    assert stage.sql("SELECT count(*) FROM dependencies") == [(0,)]


def test_a_job_is_named_by_handle_id_or_alias(stage: Stage) -> None:
    jobs = [stage.job(), stage.job(), stage.job(aliases=["third"])]
    waits = blocked(stage, jobs[0], jobs[1].id, "third", str(jobs[0].id))  # type: ignore[arg-type]
    assert waits.dependencies == jobs


def test_what_has_completed_or_is_gone_is_not_waited_for(stage: Stage) -> None:
    done, gone = stage.job(), stage.job()
    stage.run(done)
    gone.terminate(without_shutdown=True)
    assert gone.delete()
    waits = stage.job(depends_on=[done, gone, 10**12])
    assert is_free(waits)
    assert waits.depend_on(done).dependencies == []
    assert stage.run(waits) == "completed"


def test_one_who_rests_without_having_completed_is_waited_for(stage: Stage) -> None:
    def rests(job: RunningJob) -> None:
        job.suspend()

    first = stage.job(rests)
    waits = blocked(stage, first)
    assert stage.run(first) == "suspended"
    assert waits.refresh().waiting_for == ["dependencies"]
    first.terminate(without_shutdown=True)
    assert waits.refresh().waiting_for == ["dependencies"]
    first.delete()
    stage.drain()
    assert str(waits.refresh().status) == "completed"


def test_one_who_was_asked_again_is_waited_for_until_it_rests(stage: Stage) -> None:
    first = stage.job(lambda job: stage.outside(Job(job.id, runtime=stage.runtime).run))
    waits = blocked(stage, first)
    hold = stage.claim(first)
    assert hold is not None
    stage.perform(hold)
    assert (str(first.refresh().status), waits.refresh().waiting_for) == ("queued", ["dependencies"])


def test_a_timer_that_is_cancelled_lets_a_completed_job_have_completed(stage: Stage) -> None:
    first = stage.job()
    stage.run(first)
    first.run(countdown=3600)
    waits = blocked(stage, first)
    assert first.cancel_timer(first.timers[0])
    assert (str(first.refresh().status), is_free(waits)) == ("completed", True)


def test_a_delay_is_kept_whatever_comes_first(stage: Stage) -> None:
    first = stage.job()
    soon, late = blocked(stage, first, countdown=3600), blocked(stage, first, countdown=3600)
    assert soon.waiting_for == ["dependencies", "timer"]
    stage.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", soon.id)
    stage.drain()
    assert [str(job.refresh().status) for job in (first, soon, late)] == ["completed", "completed", "queued"]
    assert late.waiting_for == ["timer"]
    stage.sql("UPDATE timers SET due_at = now() WHERE job_id = %s", late.id)
    stage.drain()
    assert str(late.refresh().status) == "completed"


def test_its_time_comes_while_it_waits_for_others(stage: Stage) -> None:
    first = stage.job()
    waits = blocked(stage, first, countdown=3600)
    stage.sql("UPDATE timers SET due_at = now()")
    operations.look(stage.runtime, [waits.id])
    apply_due_timers(stage.runtime, waits.id)
    assert (waits.refresh().waiting_for, stage.claim(waits)) == (["dependencies"], None)
    stage.run(first)
    assert stage.run(waits) == "completed"


def test_asking_or_forcing_a_blocked_job_does_not_begin_it(stage: Stage) -> None:
    waits = blocked(stage, stage.job())
    waits.run()
    waits.run(force=True)
    assert (stage.claim(waits), waits.waiting_for) == (None, ["dependencies"])


def test_its_rate_or_its_priority_changes_nothing(stage: Stage) -> None:
    first = stage.job()
    waits = blocked(stage, first, priority=1)
    waits.set_priority(9)
    assert stage.claim(waits) is None
    stage.run(first)
    assert stage.run(waits) == "completed"


def test_a_job_that_waits_is_terminated_at_once_and_waits_for_nobody(stage: Stage) -> None:
    waits = blocked(stage, stage.job())
    waits.terminate()
    assert (waits.waiting_for, waits.dependencies) == ([], [])
    assert stage.run(waits) == "terminated"
    waits.run(force=True)
    assert stage.run(waits) == "completed"


def test_jobs_are_found_by_what_they_wait_for(stage: Stage) -> None:
    first = stage.job()
    waiting = [blocked(stage, first, queue=queue) for queue in ("a", "b")]
    later = stage.job(countdown=3600)
    assert stage.sidejob.jobs(waiting_for="dependencies") == waiting
    assert stage.sidejob.jobs(waiting_for="dependencies", queue="b") == waiting[1:]
    assert stage.sidejob.jobs(waiting_for="dependencies", limit=1) == waiting[:1]
    assert stage.sidejob.jobs(waiting_for="timer") == [later]
    assert list(stage.sidejob.iter_jobs(waiting_for="dependencies", page=1)) == waiting
    assert stage.sidejob.jobs(waiting_for="pause") == []


def test_a_person_sees_who_waits_for_whom(stage: Stage) -> None:
    first = stage.job()
    waits = blocked(stage, first)
    details = JobViews(stage.runtime).details(waits)
    assert (details["dependencies"], details["dependents"], details["waiting_for"]) == (
        [first.id],
        [],
        ["dependencies"],
    )
    assert details["message"]["due_at"] is None, "it is due at no time"
    assert JobViews(stage.runtime).details(first)["dependents"] == [waits.id]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_waited_out_until_somebody_retries_it(stage: Stage) -> None:
    works: list[int] = []
    first = stage.job(lambda job: works or fails(job))
    waits = blocked(stage, first)
    with pytest.raises(ValueError, match="does not work"):
        stage.run(first)
    assert waits.refresh().waiting_for == ["dependencies"]
    works.append(1)
    (entry,) = stage.sidejob.dead.list()
    stage.sidejob.dead.retry(entry.id)
    assert stage.run(first) == "completed"
    assert stage.run(waits) == "completed"


@pytest.mark.parametrize("how", ["failed", "terminated", "lost"])
@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_failure_fails_those_who_asked_for_that(stage: Stage, how: str, comes: str) -> None:
    first, ran = stage.job(fails if how == "failed" else None), []

    def go_wrong() -> None:
        if how == "failed":
            with pytest.raises(ValueError, match="does not work"):
                stage.run(first)
        elif how == "terminated":
            first.terminate(without_shutdown=True)
        else:
            for _ in range(stage.runtime.settings.max_losses):
                worker = stage.new_worker()
                hold = stage.claim(first, worker_id=worker)
                assert hold is not None
                stage.declare_dead(worker)
                assert rescue(stage.runtime, first.id, run_no=hold.run_no, worker_id=worker)

    if comes == "before":
        go_wrong()
    waits = stage.job(lambda job: ran.append(1), depends_on=[first, stage.job()], on_failure="fail")
    if comes == "after":
        go_wrong()
    with pytest.raises(DependencyFailedError, match=f"Job {first.id}, on which"):
        stage.run(waits)
    assert (str(waits.refresh().status), ran, waits.dependencies) == ("failed", [], [])
    (entry,) = [entry for entry in stage.sidejob.dead.list() if entry.job_id == waits.id]
    stage.sidejob.dead.retry(entry.id)
    assert stage.run(waits) == "completed", "a retry by hand does not fail for it again"
    assert ran == [1]


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_failure_is_as_good_as_success_for_those_who_asked_for_that(stage: Stage, comes: str) -> None:
    first = stage.job()
    if comes == "before":
        first.terminate(without_shutdown=True)
    waits = stage.job(depends_on=[first], on_failure="run")
    if comes == "after":
        assert waits.waiting_for == ["dependencies"]
        first.terminate(without_shutdown=True)
    assert stage.run(waits) == "completed"


def test_more_dependencies_than_one_look_confirms(stage: Stage) -> None:
    jobs = stage.sidejob.enqueue_many([{"task": stage.idle}] * 1001)
    waits = blocked(stage, *jobs)
    assert stage.sql("SELECT state, count(*) FROM dependencies GROUP BY 1") == [("kept", 1001)]
    for job in jobs[:-1]:
        stage.sql("UPDATE dependencies SET state = 'over' WHERE depends_on = %s", job.id)
    stage.sql("UPDATE jobs SET status = 'completed' WHERE id <= %s", jobs[-2].id)
    stage.sql("DELETE FROM messages WHERE job_id <= %s", jobs[-2].id)
    operations.look(stage.runtime, [waits.id])
    assert waits.refresh().dependencies == jobs[-1:]
    stage.run(jobs[-1])
    assert stage.run(waits) == "completed"


# -- changing what is waited for ---------------------------------------------------------------------------------------


def test_a_job_that_was_published_waits_after_all(stage: Stage) -> None:
    job, first = stage.job(), stage.job()
    job.depend_on(first)
    assert (stage.claim(job, for_run=1), job.refresh().waiting_for) == (None, ["dependencies"])
    stage.run(first)
    assert stage.run(job) == "completed"


def test_a_claim_that_waits_for_depend_on_begins_nothing(stage: Stage, at: Arm, aside: Aside) -> None:
    job, first = stage.job(), stage.job()
    claims: list[Future[Any]] = []

    def come() -> None:
        claims.append(aside(lambda: stage.claim(job, for_run=1)))
        stage.wait_for_waiters()

    at("depend:before-commit", come)
    job.depend_on(first)
    assert claims[0].result(10) is None
    assert job.refresh().info["run_no"] == 0


def test_nobody_depends_on_others_once_it_has_begun(stage: Stage) -> None:
    job, other = stage.job(), stage.job()
    hold = stage.claim(job)
    for change in (lambda: job.depend_on(other), job.undepend):
        with pytest.raises(IllegalMoveError, match="its first run has begun"):
            change()
    assert hold is not None
    stage.perform(hold)
    job.run()
    with pytest.raises(IllegalMoveError, match="its first run has begun"):
        job.depend_on(other)


def test_undepend_takes_one_or_all_away(stage: Stage) -> None:
    first, second, third = (stage.job() for _ in range(3))
    waits = blocked(stage, first, second, third)
    assert waits.undepend(second).dependencies == [first, third]
    assert waits.undepend(second, 10**9).waiting_for == ["dependencies"]
    assert waits.undepend().dependencies == []
    assert stage.run(waits) == "completed"


def test_undepend_undoes_a_failure_that_nobody_has_looked_at(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stage.job()
    waits = blocked(stage, first, on_failure="fail")
    with monkeypatch.context() as patch:
        patch.setattr("celery_sidejob.operations.changes.follow_up.look", lambda runtime, job_ids: None)
        first.terminate(without_shutdown=True)
        assert stage.sql("SELECT state FROM dependencies") == [("failed",)]
    waits.undepend(first)
    assert stage.run(waits) == "completed"


def test_a_failure_is_not_forgotten_for_a_further_dependency(stage: Stage) -> None:
    failed, further = stage.job(fails), stage.job()
    waits = blocked(stage, failed, on_failure="fail", countdown=3600)
    with pytest.raises(ValueError, match="does not work"):
        stage.run(failed)
    waits.depend_on(further)
    stage.run(further)
    stage.sql("UPDATE timers SET due_at = now()")
    apply_due_timers(stage.runtime, waits.id)
    with pytest.raises(DependencyFailedError, match=f"Job {failed.id}"):
        stage.run(waits)


def test_who_is_to_depend_on_nobody_does_not_fail_for_another(stage: Stage) -> None:
    failed, further = stage.job(fails), stage.job()
    waits, fails_still = (blocked(stage, failed, further, on_failure="fail") for _ in range(2))
    with pytest.raises(ValueError, match="does not work"):
        stage.run(failed)
    assert stage.run(waits.undepend()) == "completed"
    with pytest.raises(DependencyFailedError, match=f"Job {failed.id}"):
        stage.run(fails_still.undepend(failed))


def test_cycles_are_refused_with_the_way_around(stage: Stage) -> None:
    first = stage.job()
    second = blocked(stage, first)
    third = blocked(stage, second)
    before = stage.everything()
    with pytest.raises(CycleError, match=rf"\({first.id} → {third.id} → {second.id} → {first.id}, each"):
        first.depend_on(stage.job(), third)
    with pytest.raises(CycleError, match=rf"{first.id} → {first.id}"):
        first.depend_on(first)
    assert {name: rows for name, rows in stage.everything().items() if name == "dependencies"} == {
        "dependencies": before["dependencies"]
    }


def test_two_who_close_a_circle_at_once_do_not_both_succeed(stage: Stage, at: Arm, aside: Aside) -> None:
    first, second = stage.job(), stage.job()
    others: list[Future[Any]] = []

    def come() -> None:
        others.append(aside(lambda: second.depend_on(first)))
        stage.wait_for_waiters()

    at("depend:before-commit", come)
    first.depend_on(second)
    with pytest.raises(CycleError):
        others[0].result(10)
    assert (first.dependencies, second.dependencies) == ([second], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depends_on": 5}, "takes a list of jobs, ids or aliases, not 5"),
        ({"depends_on": "first"}, "takes a list of jobs, ids or aliases, not 'first'"),
        ({"depends_on": [True]}, "is a job, an id or an alias, not True"),
        ({"depends_on": [1.5]}, "is a job, an id or an alias, not 1.5"),
        ({"depends_on": [1], "on_failure": "stop"}, "on_failure is 'wait', 'fail' or 'run', not 'stop'"),
        ({"on_failure": "fail"}, "name that job in depends_on="),
    ],
)
def test_what_is_no_dependency_is_refused(stage: Stage, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        stage.job(**options)
    assert stage.row_counts()["jobs"] == 0


def test_an_alias_that_no_job_has_is_refused(stage: Stage) -> None:
    with pytest.raises(JobNotFoundError, match="no job has this alias"):
        stage.job(depends_on=["nobody"])
    with pytest.raises(JobNotFoundError, match="no job has this alias"):
        stage.job().depend_on("nobody")


# -- inside runs, in transactions, with pools --------------------------------------------------------------------------


def test_a_run_makes_a_diamond_in_one_commit(stage: Stage) -> None:
    made: list[Job] = []

    def body(job: RunningJob) -> None:
        first = stage.sidejob.enqueue(stage.idle)
        sides = [stage.sidejob.enqueue(stage.idle, depends_on=[first]) for _ in range(2)]
        last = stage.sidejob.enqueue(stage.idle)
        last.depend_on(*sides)
        assert (last.dependencies, sides[0].dependencies) == (sides, [first])
        with pytest.raises(CycleError):
            first.depend_on(last)
        last.undepend(sides[1])
        assert last.dependencies == [sides[0]]
        made.extend([first, *sides, last])

    stage.inside(body)
    assert [job.refresh().waiting_for for job in made] == [[], *([["dependencies"]] * 3)]
    assert made[3].dependencies == [made[1]]
    assert [stage.run(job) for job in made] == ["completed"] * 4


def test_the_commit_of_a_run_judges_again(stage: Stage) -> None:
    first, second = stage.job(), stage.job()

    def body(job: RunningJob) -> None:
        first.depend_on(second)
        stage.outside(lambda: second.depend_on(first))

    with pytest.raises(CycleError):
        stage.inside(body)
    assert (first.dependencies, second.dependencies) == ([], [first])


def test_a_job_of_the_callers_transaction_waits_once_that_is_committed(stage: Stage) -> None:
    first = stage.job()
    with stage.connect(autocommit=False) as connection:
        waits = stage.sidejob.enqueue(stage.idle, depends_on=[first], transaction=connection)
        stage.run(first)  # nobody waits for that transaction
        assert first.dependents == []
    stage.drain()
    assert str(waits.refresh().status) == "completed"


def test_a_rollback_leaves_nothing(stage: Stage) -> None:
    first = stage.job()
    with stage.connect(autocommit=False) as connection:
        stage.sidejob.enqueue(stage.idle, depends_on=[first], transaction=connection)
        connection.rollback()
    stage.run(first)
    assert stage.sql("SELECT count(*) FROM dependencies") == [(0,)]


def test_a_blocked_job_takes_no_slot_of_its_pool(stage: Stage) -> None:
    pool = CapacityPool("press", limit=1)
    task = stage.task(does_nothing, name="stage.pressed", capacity=pool)
    first = stage.job()
    waits = stage.sidejob.enqueue(task, depends_on=[first])
    pressed = stage.sidejob.enqueue(task)
    assert pool.used == 1
    stage.run(first)
    assert waits.refresh().waiting_for == ["pool"]
    stage.run(pressed)
    assert stage.run(waits) == "completed"
    assert pool.used == 0


def test_a_job_gives_back_its_slot_while_it_waits_for_others(stage: Stage) -> None:
    """One for which it waits may need that slot."""
    pool = CapacityPool("press", limit=1)
    task = stage.task(does_nothing, name="stage.pressed", capacity=pool)
    job = stage.sidejob.enqueue(task)
    first = pool.apply_async(task, on_full="wait").job
    job.depend_on(first)
    job.run()
    job.run(force=True)
    assert (job.waiting_for, stage.claim(job)) == (["dependencies"], None)
    assert [holder.job for holder in pool.children()] == [first]
    stage.runtime.connections.write_behind_now()
    assert stage.sql("SELECT published_at IS NOT NULL FROM messages WHERE job_id = %s", first.id) == [(True,)]
    assert [stage.run(first), stage.run(job)] == ["completed"] * 2
    assert pool.used == 0


def does_nothing(job: object) -> None:
    """Do nothing."""


@pytest.mark.parametrize("settings", [{"ordered": True}, {"limit": 1}, {"limit_per_key": 1}])
def test_a_permit_of_a_managed_queue_passes_a_blocked_job_over(stage: Stage, settings: dict[str, Any]) -> None:
    stage.sidejob.queue(QUEUE).configure(**settings)
    first = stage.job()
    waits, other = blocked(stage, first, queue=QUEUE, priority=9), stage.job(queue=QUEUE)
    also = stage.job(queue=QUEUE, priority=8)
    also.depend_on(first)
    assert stage.sidejob.queue(QUEUE).counts.blocked == 2
    assert taken(stage, waits) == other.id


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_cancel_terminates_all_or_none(stage: Stage) -> None:
    first = stage.job()
    second = blocked(stage, first)
    third = blocked(stage, second)
    other = stage.job()
    with pytest.raises(HasDependentsError, match=rf"namely {third.id} on job {second.id}\.") as error:
        stage.sidejob.cancel(first, second, other)
    assert error.value.dependents == {second.id: (third.id,)}
    assert {str(job.refresh().status) for job in (first, second, third, other)} == {"queued"}
    assert stage.sidejob.cancel(other, first, with_dependents=True) == [first, second, third, other]
    assert {str(job.refresh().status) for job in (first, second, third, other)} == {"terminating"}


def test_cancel_names_who_is_not_there(stage: Stage) -> None:
    job = stage.job()
    with pytest.raises(JobNotFoundError, match="no job 'nobody' to be cancelled"):
        stage.sidejob.cancel(job, "nobody")
    assert (str(job.refresh().status), stage.sidejob.cancel()) == ("queued", [])


def test_cancel_in_a_run_happens_with_its_commit(stage: Stage) -> None:
    first = stage.job()
    waits = blocked(stage, first)

    def body(job: RunningJob) -> None:
        assert stage.sidejob.cancel(first, with_dependents=True) == [first, waits]
        assert str(first.refresh().status) == "queued"

    stage.inside(body)
    assert [str(job.refresh().status) for job in (first, waits)] == ["terminating"] * 2


def test_cancel_sees_who_came_to_depend_before_the_lock(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stage.job()
    between_look_and_lock(monkeypatch, stage.outside)(lambda: stage.job(depends_on=[first]))
    with pytest.raises(HasDependentsError):
        stage.sidejob.cancel(first)
    assert str(first.refresh().status) == "queued"


# -- races -------------------------------------------------------------------------------------------------------------


def test_a_diamond_of_twenty_is_freed_once(stage: Stage, aside: Aside) -> None:
    sides = [stage.job() for _ in range(20)]
    waits = blocked(stage, *sides)
    holds = [stage.claim(side) for side in sides]
    freed: list[int] = []
    free = operations.dependencies.free

    def counted(*given: Any, **options: Any) -> Any:
        row = free(*given, **options)
        freed.extend([row.id] if row is not None else [])
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations.dependencies, "free", counted)
        for done in [aside(stage.perform, hold) for hold in holds]:
            done.result(30)
    assert freed == [waits.id]
    assert stage.run(waits) == "completed"


def test_an_end_between_the_edge_and_the_look_frees_the_job(stage: Stage, at: Arm) -> None:
    first = stage.job()
    at("enqueue:after-commit", lambda: stage.outside(lambda: stage.run(first)))
    waits = stage.job(depends_on=[first])
    assert stage.run(waits) == "completed"


def test_an_end_during_the_look_waits_for_it_and_frees_the_job(stage: Stage, at: Arm, aside: Aside) -> None:
    first = stage.job()
    hold = stage.claim(first)
    ends: list[Future[Any]] = []

    def come() -> None:
        ends.append(aside(stage.perform, hold))
        stage.wait_for_waiters()

    at("look:settled", come)
    waits = stage.job(depends_on=[first])
    ends[0].result(10)
    assert stage.run(waits) == "completed"


def test_an_edge_that_comes_during_the_look_is_looked_at_next(stage: Stage, at: Arm, aside: Aside) -> None:
    first, second = stage.job(), stage.job()
    adds: list[Future[Any]] = []
    waits = stage.job()

    def come() -> None:
        adds.append(aside(lambda: waits.depend_on(second)))
        stage.wait_for_waiters()

    at("look:settled", come)
    waits.depend_on(first)
    adds[0].result(10)
    assert waits.dependencies == [first, second]
    for job in (first, second):
        assert stage.claim(waits) is None
        stage.run(job)
    assert stage.run(waits) == "completed"


@pytest.mark.parametrize("point", ["look:before-commit", "look:after-commit", "look:settled"])
def test_a_process_that_dies_before_it_has_looked_leaves_that_to_the_sweeper(stage: Stage, at: Arm, point: str) -> None:
    def die() -> None:
        raise Died

    first = stage.job()
    waits = blocked(stage, first)
    at(point, die)
    hold = stage.claim(first)
    assert hold is not None
    with pytest.raises(Died):
        stage.perform(hold)
    stage.drain()
    assert str(waits.refresh().status) == "completed"


def test_a_deletion_in_progress_is_waited_for(stage: Stage, at: Arm, aside: Aside) -> None:
    first = stage.job()
    first.terminate(without_shutdown=True)
    made: list[Future[Job]] = []

    def come() -> None:
        made.append(aside(lambda: stage.job(depends_on=[first])))
        stage.wait_for_waiters()

    at("delete:before-commit", come)
    first.delete()
    assert stage.run(made[0].result(10)) == "completed"


def test_deleting_many_frees_those_that_wait_for_any(stage: Stage) -> None:
    jobs = [stage.job() for _ in range(3)]
    waits = blocked(stage, *jobs)
    for job in jobs:
        job.terminate(without_shutdown=True)
    assert waits.refresh().waiting_for == ["dependencies"]
    for job in jobs:
        assert job.delete()
    stage.drain()
    assert str(waits.refresh().status) == "completed"

"""Jobs that are moved while they wait or rest, and jobs that go on with another task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_sidejob import CapacityPool, IllegalMoveError, InvalidValueError, Job, LeaseLostError, RunningJob
from celery_sidejob.operations import waiting
from celery_sidejob.operations.runs.recovery import rescue
from celery_sidejob.store.outbox.kinds import JOBS
from celery_sidejob.store.outbox.publishing import mark_published
from tests.jobs.test_queue import QUEUE, taken
from tests.tools.in_process import Stage

pytestmark = pytest.mark.pooled_too


def does_nothing(job: RunningJob) -> None:
    """Do nothing."""


def other_task(stage: Stage, ran: list[Any] | None = None, **options: Any) -> Any:
    """A task of another queue that takes one argument and notes it."""

    def note(job: RunningJob, what: str = "nothing") -> str:
        if ran is not None:
            ran.append(what)
        return what

    return stage.task(note, name="stage.other", **{"queue": "others", **options})


# -- moving ------------------------------------------------------------------------------------------------------------


def test_what_was_sent_of_a_job_that_is_moved_begins_nothing(stage: Stage) -> None:
    job = stage.job(queue="old")
    moved = job.move(queue="new", priority=7)
    assert (moved.id, moved.queue, moved.info["priority"]) == (job.id, "new", 7)
    assert stage.sql("SELECT queue FROM messages") == [("new",)]
    assert stage.claim(job, for_run=1) is None, "a worker of the old queue had fetched it"
    assert stage.run(job) == "completed"


def test_a_job_gets_another_task_with_its_queue_its_ports_and_its_options(stage: Stage) -> None:
    ran: list[Any] = []
    other = other_task(stage, ran, inports=["a", "more"], max_losses=7, run_rate="60/m")
    job = stage.job(inports=["a"])
    job.input("a").write("kept")
    moved = job.move(task=other, args=("x",))
    assert (moved.task, moved.queue, moved.args) == ("stage.other", "others", ["x"])
    assert sorted(port.name for port in moved.inports) == ["a", "more"]
    assert [packet.value for packet in moved.input("a").peek(1)] == ["kept"]
    assert stage.sql("SELECT max_losses, rate_burst FROM jobs WHERE id = %s", job.id) == [(7, 60)]
    assert stage.run(moved) == "completed"
    assert ran == ["x"]
    job.move(task=stage.idle, args=())
    assert stage.sql("SELECT max_losses, rate_burst, rate_opens_at FROM jobs WHERE id = %s", job.id) == [
        (None, None, None)
    ]


def test_another_task_begins_with_its_startup(stage: Stage) -> None:
    begun: list[str] = []

    other = stage.task(does_nothing, name="stage.greets")
    other.on_startup(lambda job: begun.append("hello"))
    job = stage.job()
    stage.run(job)
    moved = job.move(task=other, countdown=0)
    stage.run(moved)
    moved.move(args=(), countdown=0)
    stage.run(moved)
    assert begun == ["hello"]


def test_arguments_are_checked_as_those_of_a_call(stage: Stage) -> None:
    other, job = other_task(stage), stage.job()
    before = stage.everything()
    with pytest.raises(TypeError, match="too many positional arguments"):
        job.move(task=other, args=(1, 2))
    with pytest.raises(TypeError, match="unexpected keyword"):
        job.move(kwargs={"no": 1})
    with pytest.raises(InvalidValueError, match="priority is a number from 0 to 9"):
        job.move(priority=10)
    with pytest.raises(InvalidValueError, match="queue"):
        job.move(queue=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="countdown= takes seconds"):
        job.move(countdown="soon")  # type: ignore[arg-type]
    assert stage.everything() == before


def test_a_job_at_rest_stays_at_rest(stage: Stage) -> None:
    job = stage.job()
    stage.run(job)
    assert str(job.move(queue="new").status) == "completed"
    assert stage.sql("SELECT count(*) FROM messages") == [(0,)]
    assert str(job.move(queue="newer", countdown=0).status) == "queued"
    assert stage.sql("SELECT queue FROM messages") == [("newer",)]
    assert stage.run(job) == "completed"


def test_a_time_replaces_the_one_that_it_had(stage: Stage) -> None:
    job = stage.job(countdown=3600)
    later = datetime.now(UTC) + timedelta(days=9)
    assert [timer.due_at for timer in job.move(eta=later).timers] == [later]
    assert job.waiting_for == ["timer"]
    assert job.move(countdown=0).timers == []
    assert stage.claim(job) is not None


def test_a_job_that_is_due_is_put_off(stage: Stage) -> None:
    job = stage.job()
    assert job.move(countdown=3600).waiting_for == ["timer"]
    assert stage.claim(job, for_run=1) is None
    stage.sql("UPDATE timers SET due_at = now()")
    stage.drain()
    assert str(job.refresh().status) == "completed"


def test_a_delay_is_kept_if_none_is_given(stage: Stage) -> None:
    waits = stage.job(countdown=3600)
    assert (waits.move(queue="new").waiting_for, waits.refresh().queue) == (["timer"], "new")

    def again(job: RunningJob) -> None:
        raise job.retry(countdown=3600)

    retries = stage.job(again)
    hold = stage.claim(retries)
    assert hold is not None
    stage.perform(hold)
    assert retries.move(queue="new").waiting_for == ["retry"]
    assert stage.sql(
        "SELECT queue, due_at > now() + interval '59 minutes' FROM messages WHERE job_id = %s", retries.id
    ) == [("new", True)]
    assert stage.claim(retries) is None


def test_a_mark_that_comes_late_marks_no_moved_message(stage: Stage) -> None:
    job = stage.job()
    job.move(queue="new")
    stage.runtime.connections.transact("mark", lambda executor: mark_published(executor, JOBS, [(job.id, 1)]))
    assert stage.sql("SELECT for_run FROM messages") == [(2,)]


def test_a_failed_job_is_moved_and_then_retried(stage: Stage) -> None:
    ran: list[Any] = []
    other = other_task(stage, ran)

    def fails(job: RunningJob) -> None:
        raise ValueError("it does not work")

    job = stage.job(fails)
    with pytest.raises(ValueError, match="does not work"):
        stage.run(job)
    with pytest.raises(IllegalMoveError, match="retry it from the dead set"):
        job.move(queue="new", countdown=1)
    job = job.move(task=other, args=("mended",))
    assert str(job.status) == "failed"
    (entry,) = stage.sidejob.dead.list()
    stage.sidejob.dead.retry(entry.id)
    assert stage.run(job) == "completed"
    assert ran == ["mended"]


def test_what_runs_is_moved_by_force_alone(stage: Stage) -> None:
    errors: list[str] = []

    def body(job: RunningJob) -> None:
        job.set(done=1)
        stage.outside(lambda: refused(Job(job.id, runtime=stage.runtime)))
        stage.outside(lambda: Job(job.id, runtime=stage.runtime).move(queue="new", force=True))
        try:
            job.checkpoint()
        except LeaseLostError:
            errors.append("lost")
            raise

    def refused(job: Job) -> None:
        with pytest.raises(IllegalMoveError, match="in progress: move it when"):
            job.move(queue="new")

    job = stage.job(body)
    hold = stage.claim(job)
    assert hold is not None
    stage.perform(hold)
    assert (errors, job.refresh().state, str(job.status), job.queue) == (["lost"], {}, "queued", "new")
    assert stage.sql("SELECT losses, (SELECT losses FROM messages) FROM jobs") == [(0, 0)]
    assert stage.claim(job, for_run=2) is None, "the run that the release has armed"
    assert stage.claim(job, for_run=3) is not None


@pytest.mark.parametrize("force", [False, True])
def test_losses_are_left_with_the_place_of_the_machines_that_caused_them(stage: Stage, force: bool) -> None:
    job = stage.job(queue="old")
    dead = stage.new_worker()
    assert stage.claim(job, worker_id=dead)
    stage.declare_dead(dead)
    stage.sidejob.poll()
    assert job.refresh().info["losses"] == 1
    if force:
        assert stage.claim(job)
    assert job.move(queue="new", force=force).info["losses"] == 0
    assert stage.run(job) == "completed"


@pytest.mark.parametrize("queue", ["", "a\0", "x" * 256, 7])
def test_a_queue_that_no_broker_has_is_refused(stage: Stage, queue: Any) -> None:
    job = stage.job(queue="old")
    with pytest.raises(InvalidValueError, match="cannot be queue="):
        job.move(queue=queue)
    assert job.refresh().queue == "old"


def test_what_ends_is_not_moved(stage: Stage) -> None:
    job = stage.job()
    job.terminate()
    for force in (False, True):
        with pytest.raises(IllegalMoveError, match="is terminating: it is not moved"):
            job.move(queue="new", force=force)
    stage.run(job)
    with pytest.raises(IllegalMoveError, match="is terminated: it is not moved"):
        job.move(queue="new")


def test_a_parked_job_is_moved_to_a_queue_that_knows_its_task(stage: Stage) -> None:
    job = stage.job(queue="old")
    waiting.decline(stage.runtime, JOBS, (job.id, 1), task=job.task)
    assert job.waiting_for == ["no worker"]
    job.move(queue="new")
    assert stage.run(job) == "completed"


def test_a_job_that_waits_for_others_is_moved_and_waits_on(stage: Stage) -> None:
    first = stage.job()
    job = stage.job(depends_on=[first])
    assert job.move(queue="new").waiting_for == ["dependencies"]
    assert job.depend_on(stage.job()).waiting_for == ["dependencies"], "it has not begun, for all that it was moved"
    job.undepend(*job.dependencies[1:])
    stage.run(first)
    assert stage.sql("SELECT queue FROM messages WHERE job_id = %s", job.id) == [("new",)]
    assert stage.run(job) == "completed"


@pytest.mark.parametrize("covers", ["queued", "running"])
def test_a_job_keeps_its_slot_or_its_place_before_the_pool(stage: Stage, covers: str) -> None:
    pool = CapacityPool("press", limit=1, covers=covers)
    task = stage.task(does_nothing, name="stage.pressed", capacity=pool)
    inside = stage.sidejob.enqueue(task)
    first, second = (pool.apply_async(task, on_full="wait").job for _ in range(2))
    inside.move(queue="new")
    first.move(queue="new")
    assert (pool.used, first.waiting_for, second.waiting_for) == (1, ["pool"], ["pool"])
    assert stage.run(inside) == "completed"
    assert (first.refresh().waiting_for, second.refresh().waiting_for) == ([], ["pool"])
    assert [stage.run(first), stage.run(second)] == ["completed"] * 2
    assert pool.used == 0


def pressed(stage: Stage, name: str, pool: CapacityPool | None, body: Any = does_nothing) -> Any:
    return stage.task(body, name=f"stage.{name}", capacity=pool)


def holders(*pools: CapacityPool) -> list[list[Job | None]]:
    return [[holder.job for holder in pool.children()] for pool in pools]


@pytest.mark.parametrize(
    ("how", "covers"),
    [("waits", "queued"), ("runs", "running"), ("goes on", "queued"), ("goes on", "running"), ("rests", "running")],
)
def test_a_job_that_comes_into_another_pool_waits_for_a_slot_there_and_leaves_its_own(
    stage: Stage, how: str, covers: str
) -> None:
    left, entered = CapacityPool("left", 1, covers=covers), CapacityPool("entered", 1, covers=covers)
    then = pressed(stage, "then", entered)

    def body(job: RunningJob) -> None:
        if how == "goes on":
            job.then(then)
        if how == "rests":
            job.suspend()

    first = pressed(stage, "first", left, body)
    there, job = then.enqueue(), first.enqueue()
    behind = left.apply_async(stage.idle, on_full="wait").job
    assert holders(left, entered) == [[job], [there]]
    if how != "waits":
        hold = stage.claim(job)
        assert hold is not None
        if how != "runs":
            stage.perform(hold)
    if how != "goes on":
        job.move(task=then, force=how == "runs", countdown=0 if how == "rests" else None)
    assert holders(left, entered) == [[behind], [there]]
    assert (job.refresh().waiting_for, job.info["pool"], stage.claim(job)) == (["pool"], "entered", None)
    stage.runtime.connections.write_behind_now()
    published = "SELECT published_at IS NOT NULL FROM messages WHERE job_id = %s"
    assert stage.sql(published, behind.id) == [(True,)], "who has got the slot that was left is published at once"
    assert stage.run(there) == "completed"
    assert (holders(entered), job.waiting_for) == ([[job]], [])
    assert [stage.run(each) for each in (job, behind)] == ["completed"] * 2
    assert (left.used, entered.used) == (0, 0)


def test_a_job_holds_its_slot_for_what_the_pool_covers_that_it_has_come_into(stage: Stage) -> None:
    queued, running = (pressed(stage, each, CapacityPool(each, 1, covers=each)) for each in ("queued", "running"))
    job = queued.enqueue()
    for task in (running, queued):
        job.move(task=task)
        assert stage.sql("SELECT j.pool_runs, m.pool_runs FROM jobs j, messages m") == [(task is running,) * 2]


def test_a_queue_s_pool_takes_who_comes_and_lets_go_who_leaves(stage: Stage) -> None:
    pool, own, named = CapacityPool("pool", 1), CapacityPool("own", 1), CapacityPool("named", 9)
    there = Stage(stage.database_url, sidejob_queues={"q": {"pool": pool}})
    try:
        idle, limited = there.idle, pressed(there, "limited", own)
        first, second = idle.enqueue(queue="elsewhere"), limited.enqueue()
        heavy = named.apply_async(idle, weight=3).job
        first.move(queue="q")
        second.move(queue="q")
        heavy.move(queue="q")
        assert holders(pool, own, named) == [[first], [second], [heavy]]
        second.move(task=idle, queue="q")
        assert (holders(pool, own), second.waiting_for, named.used) == ([[first], []], ["pool"], 3)
        first.move(queue="elsewhere")
        assert (holders(pool), first.info["pool"], first.waiting_for) == ([[second]], None, [])
        second.move(task=limited)
        assert holders(pool, own) == [[], [second]]
        assert [there.run(each) for each in (first, second, heavy)] == ["completed"] * 3
    finally:
        there.close()


def test_a_moved_job_waits_before_its_pool_by_its_new_priority(stage: Stage) -> None:
    pool = CapacityPool("press", 1)
    task = pressed(stage, "pressed", pool)
    inside, first, last = task.enqueue(), *(pool.apply_async(task, on_full="wait").job for _ in range(2))
    last.move(priority=9)
    stage.run(inside)
    assert (first.waiting_for, last.waiting_for) == (["pool"], [])


def test_a_job_comes_into_a_managed_queue_and_leaves_it(stage: Stage) -> None:
    stage.sidejob.queue(QUEUE).configure(ordered=True)
    comes, there = stage.job(queue="elsewhere"), stage.job(queue=QUEUE, priority=5)
    leaves = stage.job(queue=QUEUE, priority=9)
    comes.move(queue=QUEUE, priority=6)
    leaves.move(queue="elsewhere")
    assert stage.sidejob.queue(QUEUE).peek() == [comes, there]
    assert [taken(stage, there) for _ in range(3)] == [comes.id, there.id, None]
    assert stage.claim(leaves) is not None


def test_a_run_moves_others_with_its_commit(stage: Stage) -> None:
    job = stage.job()

    def body(running: RunningJob) -> None:
        job.move(queue="new")
        assert job.refresh().queue != "new"
        with pytest.raises(IllegalMoveError, match=r"call job\.then\(\)"):
            running.move(queue="new")
        with pytest.raises(IllegalMoveError, match="cannot be part of a unit"):
            job.move(queue="new", force=True)
        made = stage.sidejob.enqueue(stage.idle)
        made.move(queue="newest")

    stage.inside(body)
    assert job.refresh().queue == "new"
    assert stage.sql("SELECT queue FROM messages ORDER BY job_id") == [("new",), ("newest",)]
    assert stage.drain() == 2


def test_the_history_tells_of_a_move(stage: Stage) -> None:
    job = stage.job()
    job.move(queue="new")
    assert [(entry.what, entry.detail) for entry in job.history][1:] == [("moved", {"queue": "new"})]


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_job_goes_on_with_another_task(stage: Stage) -> None:
    ran: list[Any] = []
    other = other_task(stage, ran)

    def body(job: RunningJob) -> str:
        job.then(stage.idle, ())
        job.then(other, ("second",), priority=4)
        job.set(stage=1)
        return "first"

    job = stage.job(body)
    task_id = job.task_id
    stage.perform(stage.claim(job))
    job.refresh()
    assert (str(job.status), job.task, job.queue, job.args, job.task_id) == (
        "queued", "stage.other", "others", ["second"], task_id,
    )  # fmt: skip
    assert "goes on" in stage.ignored[job.id]
    assert stage.sql("SELECT closed_at FROM askings") == [(None,)]
    assert stage.sql("SELECT queue, for_run FROM messages") == [("others", 2)]
    assert stage.run(job) == "completed"
    assert (ran, job.refresh().state, job.info["retries"]) == (["second"], {"stage": 1}, 0)
    assert stage.sql("SELECT outcome FROM askings") == [("completed",)]


def test_the_same_goes_on_with_other_arguments_and_later(stage: Stage) -> None:
    ran: list[int] = []

    def counts(job: RunningJob, number: int) -> None:
        ran.append(number)
        if number < 2:
            job.then(args=(number + 1,), countdown=3600)

    job = stage.sidejob.enqueue(stage.task(counts, name="stage.counts"), (0,))
    for due in range(3):
        if due:
            assert (job.refresh().waiting_for, stage.claim(job)) == (["timer"], None)
            stage.sql("UPDATE messages SET due_at = now()")
        stage.perform(stage.claim(job))
    assert (ran, str(job.refresh().status)) == ([0, 1, 2], "completed")


@pytest.mark.parametrize("ends", ["suspends", "retries", "fails"])
def test_only_a_run_that_completes_goes_on(stage: Stage, ends: str) -> None:
    other = other_task(stage)

    def body(job: RunningJob) -> None:
        job.then(other)
        if ends == "suspends":
            job.suspend()
        raise job.retry(countdown=0) if ends == "retries" else ValueError("it does not work")

    job = stage.job(body)
    stage.perform(stage.claim(job))
    assert (job.refresh().task, str(job.status)) == (
        "stage.call", {"suspends": "suspended", "retries": "queued", "fails": "failed"}[ends],
    )  # fmt: skip


def test_a_termination_wins_and_a_packet_goes_to_the_next_stage(stage: Stage) -> None:
    other = other_task(stage, inports=["a"])

    def body(job: RunningJob) -> None:
        job.then(other)
        same = Job(job.id, runtime=stage.runtime)
        stage.outside(lambda: same.terminate() if job.args[0] == 1 else same.input("a").write(1))

    first, second = stage.job(body, inports=["a"]), stage.job(body, inports=["a"])
    for job in (first, second):
        stage.perform(stage.claim(job))
    assert (str(first.refresh().status), first.task) == ("terminating", "stage.call")
    assert (str(second.refresh().status), second.task, len(second.input("a"))) == ("queued", "stage.other", 1)
    assert stage.run(second) == "completed"


def test_a_commit_does_not_use_the_next_stage_up(stage: Stage) -> None:
    def body(job: RunningJob) -> None:
        job.then(other)
        job.checkpoint()

    other = other_task(stage)
    job = stage.job(body)
    stage.perform(stage.claim(job))
    assert job.refresh().task == "stage.other"


def test_parents_and_dependents_hear_of_the_last_stage_alone(stage: Stage) -> None:
    other = other_task(stage)

    def stages(job: RunningJob) -> None:
        job.then(other)

    def has_child(job: RunningJob) -> None:
        if not job.children:
            job.enqueue(stage.app.tasks["stage.stages"], child_name="kid")
        job.suspend()

    stage.task(stages, name="stage.stages")
    parent = stage.job(has_child)
    stage.run(parent)
    kid = parent.children["kid"]
    waits = stage.job(depends_on=[kid])
    stage.perform(stage.claim(kid))
    kid.refresh()
    assert (str(parent.refresh().status), waits.waiting_for) == ("suspended", ["dependencies"])
    stage.run(kid)
    assert (str(parent.refresh().status), waits.refresh().waiting_for) == ("queued", [])


def test_a_shutdown_goes_on_with_nothing(stage: Stage) -> None:
    errors: list[str] = []

    def shutdown(job: RunningJob) -> None:
        try:
            job.then()
        except IllegalMoveError as error:
            errors.append(str(error))

    task = stage.task(does_nothing, name="stage.shuts")
    task.on_shutdown(shutdown)
    job = task.enqueue()
    stage.run(job)
    job.terminate()
    stage.run(job)
    assert errors == [f"then() in the shutdown of job {job.id}: the job ends, and nothing can follow."]


def test_a_lost_run_begins_the_same_stage_again(stage: Stage) -> None:
    other = other_task(stage)
    job = stage.job(lambda job: job.then(other))
    worker = stage.new_worker()
    hold = stage.claim(job, worker_id=worker)
    assert hold is not None
    stage.declare_dead(worker)
    assert rescue(stage.runtime, job.id, run_no=hold.run_no, worker_id=worker)
    stage.perform(hold)
    assert (job.refresh().task, job.info["losses"]) == ("stage.call", 1)
    stage.perform(stage.claim(job))
    assert job.refresh().task == "stage.other"

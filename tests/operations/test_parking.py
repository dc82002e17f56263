"""A job whose task no worker knows is parked, whoever is first, and goes on when a worker registers the task."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from celery_sidejob import IllegalMoveError, Job
from celery_sidejob.model.crash_points import acting
from celery_sidejob.model.status import Gate
from celery_sidejob.operations import waiting
from celery_sidejob.operations.runs import runs
from celery_sidejob.operations.runs.terminations import end_parked
from celery_sidejob.store import asks, jobs, parked
from celery_sidejob.store.outbox.kinds import JOBS, TASKS
from celery_sidejob.store.outbox.publishing import mark_published
from tests.tools.commands import ask
from tests.tools.crash_points import Arm
from tests.tools.in_process import Stage

Aside = Callable[..., Future[Any]]
TASK, QUEUE = "stage.idle", "celery"


def due_run(stage: Stage, job: Job) -> int:
    """The run that the job's message is for."""
    return int(stage.sql("SELECT for_run FROM messages WHERE job_id = %s", job.id)[0][0])


def receive(stage: Stage, job: Job, *, for_run: int | None = None) -> None:
    """What a worker does that receives the job's message and does not know its task."""
    waiting.decline(stage.runtime, JOBS, (job.id, for_run or due_run(stage, job)), task=job.task)


def announce(
    stage: Stage, *, tasks: tuple[str, ...] = (TASK,), queues: tuple[str, ...] = (QUEUE,), worker: int | None = None
) -> int:
    """What a worker does that begins to serve these; returns how many runs it has released."""
    serve = partial(waiting.serve, worker_id=worker or stage.new_worker(), queues=queues, tasks=tasks)
    return int(stage.runtime.connections.transact("serve", serve).runs)


def parked_job(stage: Stage, **options: Any) -> Job:
    job = stage.job(**options)
    receive(stage, job)
    assert is_parked(stage, job)
    return job


def is_parked(stage: Stage, job: Job) -> bool:
    return (job.id,) in parked_jobs(stage)


def parked_jobs(stage: Stage) -> list[tuple[Any, ...]]:
    return stage.sql(f"SELECT job_id FROM messages WHERE gate = {Gate.WORKER}")


# -- parked and released ---------------------------------------------------------------------------------------------


def test_a_job_is_parked_and_says_why_until_a_worker_of_its_queue_knows_its_task(stage: Stage) -> None:
    job = parked_job(stage)
    assert job.waiting_for == ["no worker"]
    assert stage.drain() == 0, "no claim takes it"

    assert announce(stage, tasks=("stage.call",)) == 0
    assert announce(stage, queues=("other",)) == 0
    assert is_parked(stage, job)

    assert announce(stage) == 1
    assert job.waiting_for == []
    assert stage.run(job) == "completed"
    assert parked_jobs(stage) == []


def test_the_sweeper_publishes_what_was_released_at_once(stage: Stage) -> None:
    job = parked_job(stage)
    stage.sidejob.poll()
    assert stage.sql("SELECT published_at FROM messages") == [(None,)]
    announce(stage)
    assert stage.sidejob.poll().published == 1
    assert stage.run(job) == "completed"


def test_it_is_not_parked_where_a_live_worker_knows_it_and_its_message_is_sent_again_soon(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    announce(stage, worker=stage.worker_id)
    job = stage.job()
    stage.sql("UPDATE messages SET published_at = now(), next_check_at = now() + check_interval")
    receive(stage, job)
    assert not is_parked(stage, job)
    wait = "SELECT extract(epoch FROM next_check_at - now())::float FROM messages WHERE published_at IS NULL"
    for_run = due_run(stage, job)
    mark_published(stage.runtime.connections, JOBS, [(job.id, for_run)], again=False)  # of a client, a second later
    for _ in range(3):
        assert 4 < stage.sql(wait)[0][0] < 6
        assert re.search(
            rf"Job {job.id} \(stage.idle\) is not run here: .* Nothing is lost: its message is sent again in 5 "
            r"seconds, .* start this worker with the code of the task",
            caplog.messages[-1],
        )
        receive(stage, job)

    stage.declare_dead(stage.worker_id)
    receive(stage, job)
    assert is_parked(stage, job)


def test_a_run_forgets_that_its_message_was_declined(stage: Stage) -> None:
    announce(stage, worker=stage.worker_id)
    job = stage.job()
    receive(stage, job)
    assert stage.sql("SELECT declined_at IS NOT NULL FROM messages") == [(True,)]
    hold = stage.claim(job)
    assert hold is not None
    assert stage.sql("SELECT declined_at FROM messages") == [(None,)]
    stage.perform(hold)


@pytest.mark.parametrize("why", ["its run has begun", "the message is of an earlier run", "it is gone", "not due"])
def test_a_stale_message_parks_nothing(stage: Stage, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="celery_sidejob")
    job = stage.job()
    for_run = due_run(stage, job)
    if why == "its run has begun":
        assert stage.claim(job) is not None
    elif why == "the message is of an earlier run":
        stage.run(job)
        job.run()
    elif why == "it is gone":
        job.terminate()
        stage.drain()
        assert job.delete()
    else:
        stage.sql("UPDATE messages SET due_at = now() + interval '1 hour'")
    before = stage.everything()
    waiting.decline(stage.runtime, JOBS, (job.id, for_run), task=TASK)
    assert stage.everything() == before
    assert f"A message of job {job.id} (stage.idle) is dropped: " in caplog.messages[-1]
    if why == "its run has begun":
        stage.perform(stage.holds[job.id])


def test_asks_change_nothing_and_force_tries_once_more(stage: Stage) -> None:
    job = parked_job(stage)
    job.run()
    job.input("a").write(1)
    assert is_parked(stage, job)

    job.run(force=True)
    assert not is_parked(stage, job)
    receive(stage, job)
    assert is_parked(stage, job)
    assert announce(stage) == 1
    assert stage.run(job) == "completed"


def test_a_run_that_was_forced_before_its_worker_said_what_it_serves_leaves_nothing_behind(stage: Stage) -> None:
    job = parked_job(stage)
    job.run(force=True)
    assert stage.run(job) == "completed"
    assert announce(stage) == 0
    assert parked_jobs(stage) == []


def test_many_are_released_in_pages(stage: Stage) -> None:
    many = stage.sidejob.enqueue_many([{"task": stage.idle}] * (parked.RELEASED_TOGETHER + 1))
    stage.sql(f"UPDATE messages SET published_at = NULL, gate = {Gate.WORKER}, next_check_at = 'infinity'")
    worker = stage.new_worker()
    assert announce(stage, worker=worker) == parked.RELEASED_TOGETHER
    assert announce(stage, worker=worker) == len(many) - parked.RELEASED_TOGETHER
    assert parked_jobs(stage) == []


# -- announced once, and free ----------------------------------------------------------------------------------------


def test_it_is_told_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="celery_sidejob")
    job = stage.job()
    for_run = due_run(stage, job)
    for _ in range(3):  # copies of one message
        receive(stage, job, for_run=for_run)
    said = [record.message for record in caplog.records if "is parked" in record.message]
    assert len(said) == 1
    assert f"Job {job.id} is parked: no worker of queue celery knows its task stage.idle. Nothing is lost: " in said[0]
    assert said[0].endswith("goes on when a worker starts that imports the task. Start one, or terminate the job")


def test_no_turn_of_the_sweeper_reads_or_writes_it(stage: Stage) -> None:
    parked_job(stage)
    stage.sidejob.poll()
    where = "SELECT ctid::text, xmin::text, xmax::text FROM messages"
    before = stage.sql(where)
    for _ in range(3):
        assert not stage.sidejob.poll()
    assert stage.sql(where) == before


# -- two at the same time --------------------------------------------------------------------------------------------


def test_whoever_parks_waits_for_a_registration_and_then_sees_it(stage: Stage, aside: Aside) -> None:
    job = stage.job()
    for_run = due_run(stage, job)
    worker = stage.new_worker()

    def serve(executor: Any) -> None:
        waiting.serve(executor, worker, queues=[QUEUE], tasks=[TASK])
        nonlocal parks
        parks = aside(receive, stage, job, for_run=for_run)
        stage.wait_for_waiters()

    parks: Any = None
    stage.runtime.connections.transact("serve", serve)
    parks.result(10)
    assert not is_parked(stage, job)
    assert stage.run(job) == "completed"


def test_a_registration_waits_for_whoever_parks_and_then_releases_it(stage: Stage, aside: Aside) -> None:
    job = stage.job()
    for_run = due_run(stage, job)
    serves: Any = None

    def park(executor: Any) -> None:
        nonlocal serves
        jobs.lock(executor, [job.id])
        parked.take_turn(executor)
        assert parked.park(executor, JOBS, (job.id, for_run), task=TASK) is not None
        serves = aside(announce, stage)
        stage.wait_for_waiters()

    stage.runtime.connections.transact("park", park)
    assert serves.result(10) == 1
    assert not is_parked(stage, job)
    assert stage.run(job) == "completed"


def test_whoever_parks_waits_for_a_termination_and_then_sees_it(stage: Stage, aside: Aside) -> None:
    job = stage.job()
    for_run = due_run(stage, job)

    def terminate(executor: Any) -> Any:
        jobs.lock(executor, [job.id])
        asks.terminate(executor, [job.id], tree=False, check_interval_s=30.0)
        parks = aside(receive, stage, job, for_run=for_run)
        stage.wait_for_waiters()
        return parks

    stage.runtime.connections.transact("terminate", terminate).result(10)
    assert stage.sql("SELECT declined_at IS NOT NULL FROM messages") == [(True,)]
    assert stage.sql("SELECT status FROM jobs") == [("terminating",)]


def test_a_termination_waits_for_whoever_parks_and_then_sees_it(stage: Stage, aside: Aside) -> None:
    job = stage.job()
    for_run = due_run(stage, job)

    def park(executor: Any) -> Any:
        jobs.lock(executor, [job.id])
        parked.take_turn(executor)
        assert parked.park(executor, JOBS, (job.id, for_run), task=TASK) is not None
        terminates = aside(job.terminate)
        stage.wait_for_waiters()
        return terminates

    stage.runtime.connections.transact("park", park).result(10)
    assert stage.sql("SELECT declined_at IS NOT NULL FROM messages") == [(True,)]
    assert is_parked(stage, job)


@pytest.mark.parametrize("first", ["park", "serve"])
@pytest.mark.parametrize("round_", range(10))
def test_neither_order_leaves_it_parked(stage: Stage, aside: Aside, first: str, round_: int) -> None:
    job = stage.job()
    for_run = due_run(stage, job)
    calls = [(receive, stage, job), (announce, stage)]
    for done in [aside(*call) for call in (calls if first == "park" else calls[::-1])]:
        done.result(10)
    assert not is_parked(stage, job), for_run
    assert stage.run(job) == "completed"


def test_a_release_and_a_termination_of_many_wait_for_each_other_and_both_hold(stage: Stage, aside: Aside) -> None:
    many = [parked_job(stage) for _ in range(20)]
    parent = stage.job()
    for number, job in enumerate(many):
        parent.adopt(job, f"child{number}")
    released = aside(announce, stage)
    terminated = aside(parent.terminate, recursive=True)
    released.result(20), terminated.result(20)
    announce(stage)
    stage.drain()
    assert {str(job.refresh().status) for job in many} == {"terminated"}
    assert parked_jobs(stage) == []


@pytest.mark.parametrize("answer", ["before-commit", "after-commit"])
@pytest.mark.parametrize("who", ["park", "serve"])
def test_an_answer_that_is_lost_leaves_it_either_parked_or_owed(stage: Stage, who: str, answer: str) -> None:
    """The process dies there: what it has done is there, or not; its successor and the sweeper do the rest."""
    job = stage.job() if who == "park" else parked_job(stage)

    class Died(BaseException):
        pass

    def reach(point: str) -> None:
        if point == f"{who}:{answer}":
            raise Died

    with acting(reach), pytest.raises(Died):
        receive(stage, job) if who == "park" else announce(stage)
    assert is_parked(stage, job) == ((who, answer) in {("park", "after-commit"), ("serve", "before-commit")})
    announce(stage)
    assert stage.run(job) == "completed"


# -- why a job waits -------------------------------------------------------------------------------------------------


def test_waiting_for_tells_timers_retries_rates_and_missing_workers(stage: Stage) -> None:
    announce(stage, worker=stage.worker_id, tasks=("stage.idle", "stage.call"))
    assert stage.job().waiting_for == []
    assert stage.job(countdown=60).waiting_for == ["timer"]

    retried = stage.job(lambda job: (_ for _ in ()).throw(job.retry(countdown=60)))
    stage.drain()
    assert retried.waiting_for == ["retry"]
    retried.run(countdown=90)
    assert retried.waiting_for == ["retry"], "the timer's ask is later than the run that is owed"
    retried.run(force=True)
    assert retried.waiting_for == []

    rest = stage.job()
    stage.run(rest)
    assert rest.waiting_for == []
    rest.run(countdown=60)
    assert rest.waiting_for == ["timer"]
    rest.terminate()
    assert rest.waiting_for == []


def test_waiting_for_counts_only_live_workers_of_the_queue_that_know_the_task(stage: Stage) -> None:
    job = stage.job()
    assert job.waiting_for == [], "a worker is there that has not said yet what it serves"
    announce(stage, worker=stage.worker_id, queues=("other",))
    assert job.waiting_for == ["no worker"]
    announce(stage, worker=stage.worker_id)
    assert job.waiting_for == []
    hold = stage.claim(job)
    assert hold is not None
    stage.declare_dead(stage.worker_id)
    assert job.waiting_for == [], "its run is in progress"
    stage.perform(hold)
    job.run()
    assert job.waiting_for == ["no worker"]


# -- terminations ----------------------------------------------------------------------------------------------------


def later(stage: Stage) -> None:
    """A minute passes for parked jobs that were terminated."""
    stage.sql("UPDATE messages SET declined_at = declined_at - interval '61 s'")


def test_a_parked_job_that_is_terminated_ends_without_its_shutdown_after_a_minute(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    job = parked_job(stage)
    job.terminate()
    assert (job.refresh().status, job.waiting_for) == ("terminating", ["no worker"])
    assert is_parked(stage, job), "its shutdown cannot run either, and no message is sent"
    assert stage.sql("SELECT now() - declined_at < '10 s' FROM messages") == [(True,)]
    stage.sidejob.poll()
    assert job.refresh().status == "terminating"

    later(stage)
    job.terminate()
    assert stage.sidejob.poll().shutdowns_skipped == 1
    assert job.refresh().status == "terminated"
    assert stage.row_counts()["messages"] == 0
    assert f"Job {job.id} was terminated without its shutdown" in caplog.text
    assert job.delete()


def test_its_shutdown_runs_if_a_worker_comes_in_time(stage: Stage) -> None:
    ran: list[int] = []

    @stage.task(name="stage.hooked")
    def task(job: Any) -> None:
        pass

    task.on_shutdown(lambda job: ran.append(job.id))
    job = task.enqueue()
    receive(stage, job)
    job.terminate()
    assert announce(stage, tasks=("stage.hooked",)) == 1
    later(stage)
    stage.sidejob.poll()
    stage.drain()
    assert (ran, job.refresh().status) == ([job.id], "terminated")


def test_no_shutdown_is_skipped_of_a_job_that_is_not_parked_any_more(stage: Stage) -> None:
    forced, released = parked_job(stage), parked_job(stage)
    assert forced.run(force=True)
    for job in (forced, released):
        job.terminate()
    stage.sql("UPDATE messages SET declined_at = now() - interval '61 s' WHERE job_id = %s", forced.id)
    stage.sidejob.poll()
    assert announce(stage) == 1
    assert not end_parked(stage.runtime, released.id), "the sweeper read it before"
    for job in (forced, released):
        assert job.refresh().status == "terminating"


def test_a_job_that_is_parked_only_when_it_is_terminated_waits_a_minute_too(stage: Stage) -> None:
    job = stage.job()
    job.terminate()
    receive(stage, job)
    assert is_parked(stage, job)
    later(stage)
    stage.sidejob.poll()
    assert job.refresh().status == "terminated"


def test_a_tree_of_parked_jobs_ends_from_its_root(stage: Stage) -> None:
    root = stage.job()
    child = stage.job(parent=root, child_name="child")
    receive(stage, root)
    receive(stage, child)
    root.terminate(recursive=True)
    for _ in range(3):
        later(stage)
        stage.sidejob.poll()
    assert root.terminated


def test_a_forced_run_after_the_termination_is_parked_again(stage: Stage) -> None:
    job = parked_job(stage)
    job.terminate()
    later(stage)
    stage.sidejob.poll()
    job.run(force=True)
    receive(stage, job)
    assert stage.sql("SELECT declined_at FROM messages") == [(None,)]
    assert announce(stage) == 1
    assert stage.run(job) == "completed"


def test_a_run_in_progress_is_left_to_end_with_its_shutdown(stage: Stage) -> None:
    root = stage.job()
    child = stage.job(parent=root, child_name="child")
    hold = stage.claim(child)
    assert hold is not None
    assert root.terminate(recursive=True, without_shutdown=True).status == "terminated"
    assert child.refresh().status == "terminating"
    stage.perform(hold)
    stage.drain()
    assert root.terminated


@pytest.mark.parametrize("gate", ["open", "paused", "full", "rate"])
@pytest.mark.parametrize("recursive", [False, True])
def test_a_job_is_ended_without_its_shutdown_whatever_workers_and_gates_do(
    stage: Stage, at: Arm, gate: str, recursive: bool
) -> None:
    ran: list[int] = []

    @stage.task(name="stage.hooked", queue="q")
    def task(job: Any) -> None:
        pass

    task.on_shutdown(lambda job: ran.append(job.id))
    first, root = task.enqueue(), task.enqueue()
    child = root.enqueue(task, child_name="child") if recursive else None
    queue = stage.sidejob.queue("q")
    if gate == "paused":
        queue.pause()
    if gate == "full":
        queue.configure(limit=1)
    if gate == "rate":
        queue.configure(rate="1/h")
    assert runs.claim(stage.runtime, first.id, task=first.task, for_run=1, worker_id=stage.worker_id, passes=True)

    def an_idle_worker_comes() -> None:
        for job in filter(None, (root, child)):
            for (for_run,) in stage.sql("SELECT run_no + 1 FROM jobs WHERE id = %s", job.id):
                if begun := stage.claim(job, for_run=for_run):
                    stage.perform(begun)

    at("terminate:after-commit", an_idle_worker_comes)
    root.terminate(recursive=recursive, without_shutdown=True)
    assert (root.terminated, ran, stage.row_counts()["messages"]) == (True, [], 1)


def test_to_end_without_a_shutdown_is_part_of_no_unit_and_of_no_transaction_of_others(stage: Stage) -> None:
    job = stage.job()
    before = stage.everything()
    with stage.connect(autocommit=False) as connection, pytest.raises(IllegalMoveError, match="with transaction="):
        job.terminate(without_shutdown=True, transaction=connection)
    assert stage.everything() == before
    with pytest.raises(IllegalMoveError, match="inside a run"):
        stage.inside(lambda _: job.terminate(without_shutdown=True))
    assert job.refresh().status == "queued"


def test_a_deleted_tree_leaves_no_parked_job(stage: Stage) -> None:
    job = parked_job(stage)
    job.terminate(without_shutdown=True)
    assert job.delete()
    assert parked_jobs(stage) == []


# -- seen by people --------------------------------------------------------------------------------------------------


def test_commands_tell_of_parked_jobs(stage: Stage) -> None:
    job = parked_job(stage)
    parked_job(stage)
    shown = ask(stage.app, "show", job.id)
    assert any("waiting for" in line and "no worker" in line for line in shown.lines)
    assert any("parked until a worker of the queue knows the task" in line for line in shown.lines)
    details = ask(stage.app, "show", job.id, "--json").document
    assert (details["waiting_for"], details["message"]["is_parked"]) == (["no worker"], True)

    queue = ask(stage.app, "stats", "--json").document["queues"][QUEUE]
    assert (queue["parked"], queue["depth"], queue["delayed"], queue["scheduled"]) == (2, 0, 0, 0)
    assert ask(stage.app, "drain", "--timeout", 0).lines == [
        "No run is due or in progress. Left: 2 parked runs (no worker of the queue knows the task)."
    ]
    assert "workers have declined runs: 2 of stage.idle in celery" in " ".join(
        ask(stage.app, "doctor", "--json").out.split()
    )
    announce(stage)
    stage.drain()
    assert "workers have declined" not in ask(stage.app, "doctor", "--json").out


# -- durable tasks ---------------------------------------------------------------------------------------------------

LETTER = "mails.send"


def letter(stage: Stage, **options: Any) -> str:
    """Call a durable task, as if its message had been published."""
    stage.app.conf.sidejob_durable_tasks = ["mails.*"]
    task_id = str(stage.app.send_task(LETTER, **options).id)
    stage.runtime.connections.write_behind_now()
    return task_id


def decline(stage: Stage, task_id: str, *, task: str = LETTER, **options: Any) -> bool:
    return waiting.decline(stage.runtime, TASKS, (task_id, 1), task=task, **options)


def parked_tasks(stage: Stage) -> list[str]:
    return [row[0] for row in stage.sql(f"SELECT task_id FROM messages WHERE gate = {Gate.WORKER}")]


def age(stage: Stage) -> None:
    """A day passes."""
    stage.sql("UPDATE messages SET next_check_at = next_check_at - interval '24 h', "
              "declined_at = declined_at - interval '24 h'")  # fmt: skip


def test_a_durable_task_is_parked_until_a_worker_of_its_queue_knows_it(stage: Stage) -> None:
    task_id = letter(stage)
    announce(stage, tasks=("mails.other",))
    assert not decline(stage, task_id)
    assert parked_tasks(stage) == [task_id]
    before = stage.everything(without=["counters"])
    stage.sidejob.poll()
    assert stage.everything(without=["counters"])["messages"] == before["messages"]
    assert stage.sidejob.stats()["queues"]["celery"]["parked"] == 1
    shown = ask(stage.app, "show", task_id).out
    assert "declined" in shown
    assert "9000" not in shown

    assert announce(stage, tasks=(LETTER,), queues=("other",)) == 0
    assert announce(stage, tasks=(LETTER,)) == 1
    assert parked_tasks(stage) == []
    assert stage.sidejob.poll().published == 1


def test_a_task_that_nobody_knows_for_a_day_goes_to_the_dead_set(stage: Stage) -> None:
    task_id = letter(stage)
    decline(stage, task_id)
    assert stage.sql("SELECT next_check_at - now() BETWEEN '23 h' AND '24 h' FROM messages") == [(True,)]
    age(stage)
    assert stage.sidejob.poll().tasks_buried == 1
    (entry,) = stage.sidejob.dead.list()
    assert (entry.task_id, entry.reason, entry.group) == (task_id, "failed", "NotRegistered")
    assert entry.error.startswith(
        "NotRegistered: no worker of queue celery has known the task mails.send for 24 hours. `dead retry` begins it"
    )
    stage.sidejob.dead.retry(entry.id)
    assert not decline(stage, task_id), "its message was of an earlier generation"
    waiting.decline(stage.runtime, TASKS, (task_id, 2), task=LETTER)
    assert parked_tasks(stage) == [task_id]


@pytest.mark.parametrize("reason", ["revoked", "expired"])
def test_a_parked_task_is_revoked_and_expires(stage: Stage, reason: str) -> None:
    task_id = letter(stage, **({"expires": 60} if reason == "expired" else {}))
    decline(stage, task_id)
    if reason == "revoked":
        stage.app.control.revoke(task_id)
    else:
        assert stage.sql("SELECT next_check_at = expires_at FROM messages") == [(True,)]
        stage.sql("UPDATE messages SET next_check_at = now(), expires_at = now() - interval '1 s'")
    stage.sidejob.poll()
    assert [(entry.task_id, entry.reason) for entry in stage.sidejob.dead.list()] == [(task_id, reason)]


def test_a_task_that_another_worker_knows_is_sent_again_as_long_as_that_lives(stage: Stage) -> None:
    announce(stage, tasks=(LETTER,))
    task_id = letter(stage)
    for _ in range(2):
        assert not decline(stage, task_id)
        age(stage)
    assert stage.sidejob.poll().published == 1
    assert parked_tasks(stage) == []


def test_a_task_that_no_worker_can_read_is_sent_again_for_a_day(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    task_id = letter(stage)
    waits = []
    for _ in range(10):
        assert not decline(stage, task_id, unread="DecodeError: who knows")
        waits += stage.sql("SELECT round(extract(epoch FROM next_check_at - now()))::int FROM messages")[0]
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert f"Task {task_id} (mails.send) is not run here: this worker cannot read its message (Dec" in caplog.text
    assert stage.sidejob.stats()["queues"]["celery"]["unpublished"] == 0
    age(stage)
    assert decline(stage, task_id, unread="DecodeError: who knows")


@pytest.mark.parametrize("why", ["of another task", "it runs", "revoked"])
def test_a_message_that_is_not_owed_declines_nothing(stage: Stage, why: str) -> None:
    task_id = letter(stage)
    if why == "it runs":
        stage.sql("UPDATE messages SET locked_by = %s, locked_at = now()", stage.worker_id)
    if why == "revoked":
        stage.app.control.revoke(task_id)
    before = stage.everything()
    for unread in (None, "DecodeError"):
        assert not decline(stage, task_id, task="mails.forged" if why == "of another task" else LETTER, unread=unread)
    assert stage.everything() == before

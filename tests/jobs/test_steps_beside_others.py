"""Steps beside what else a job may have: rates, limits, pools, unique keys, batches, ports of every kind, moves."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob import NO_DATA, CapacityPool, RunningJob, Status
from celery_sidejob.services.duty import Report
from celery_sidejob.services.sweep.prune import Prune
from celery_sidejob.services.sweep.sweep import Sweep
from tests.jobs.test_steps import Calls, calls, killed_at, pass_time
from tests.tools.in_process import Stage

__all__ = ["calls"]


def test_each_return_to_a_wait_takes_a_token_of_the_rate(stage: Stage, calls: Calls) -> None:
    @stage.task(name="rated", run_rate="2/h", inports=["answers"])
    def rated(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.receive("answers")
        job.sleep("rest", seconds=60)

    job = rated.enqueue()
    assert stage.run(job) == Status.SUSPENDED
    job.input("answers").write(1)
    assert stage.drain() == 1
    pass_time(stage, job)
    assert stage.drain() == 0, "the third run waits for a token"
    stage.sql("UPDATE messages SET due_at = now()")
    stage.sql("UPDATE jobs SET rate_opens_at = now()")
    assert stage.drain() == 1
    assert (job.refresh().status, calls.of["charge"]) == (Status.COMPLETED, 1)


def test_a_packet_on_a_port_of_any_name_that_comes_too_late_begins_nothing_anew(stage: Stage, calls: Calls) -> None:
    @stage.task(name="any", inports=["*"])
    def any_port(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        assert job.receive("answers", timeout=60) is NO_DATA

    job = any_port.enqueue()
    assert stage.run(job) == Status.SUSPENDED
    pass_time(stage, job)
    stage.drain()
    job.input("answers").write("late")
    assert (job.refresh().status, stage.drain()) == (Status.COMPLETED, 0)
    job.input("more").write("new")
    assert job.refresh().status == Status.QUEUED


@pytest.mark.parametrize("reads", ["for_inputs", "read", "read_many"])
def test_a_port_that_a_later_body_reads_otherwise_asks_the_job_again(stage: Stage, calls: Calls, reads: str) -> None:
    got: list[Any] = []
    code = "old"

    @stage.task(name="changing", inports=["answers"])
    def changing(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        if code == "old":
            got.append(job.receive("answers"))
        elif reads == "for_inputs":
            got.extend(job.for_inputs("answers"))
        elif reads == "read":
            got.append(job.input("answers").read())
        else:
            got.extend(job.input("answers").read_many(10))

    job = changing.enqueue()
    job.input("answers").write(1)
    stage.drain()
    assert (job.refresh().status, got) == (Status.COMPLETED, [1])
    code = "new"
    job.run()
    job.input("answers").write(2)
    stage.drain()
    job.input("answers").write(3)
    assert job.refresh().status == Status.QUEUED, "the body reads the port in another way now"
    stage.drain()
    assert got == [1, 2, 3]


def test_the_one_loss_that_a_job_may_not_have_fails_it_and_a_retry_goes_on(stage: Stage, calls: Calls) -> None:
    @stage.task(name="fragile", max_losses=1)
    def fragile(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.sleep("rest", seconds=60)
        job.step("pack", calls, "pack")

    job = fragile.enqueue()
    killed_at(stage, job, "step:after-commit")
    assert job.refresh().status == Status.FAILED
    (entry,) = stage.sidejob.dead
    assert entry.reason == "lost"
    stage.sidejob.dead.retry(entry.id)
    stage.drain()
    pass_time(stage, job)
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"charge": 1, "pack": 1})


@pytest.mark.parametrize("does", [False, True])
def test_a_finished_step_begins_the_count_of_losses_anew(stage: Stage, calls: Calls, does: bool) -> None:
    @stage.task(name="fragile", max_losses=2)
    def fragile(job: RunningJob) -> None:
        for number in range(4):
            job.step("page", job.set if does else calls, **({"at": number} if does else {"name": "page"}))
        calls("end")

    job = fragile.enqueue()
    for _ in range(4):
        killed_at(stage, job, "step:after-commit")
    assert job.refresh().status == Status.QUEUED
    assert stage.run(job) == Status.COMPLETED
    assert calls.of == {"end": 1} | ({} if does else {"page": 4})


@pytest.mark.parametrize("covers", ["queued", "running"])
def test_a_caller_leaves_its_place_in_a_pool_to_its_child(stage: Stage, covers: Any) -> None:
    pool, values = CapacityPool("gpu", 1, covers=covers), []

    @stage.task(name="child", capacity=pool)
    def child(job: RunningJob, number: int) -> int:
        return number

    @stage.task(name="parent", capacity=pool)
    def parent(job: RunningJob) -> None:
        values.append(job.call("one", child, (1,)))
        values.append(job.call_all("more", [child.s(number) for number in range(3)]))

    job = parent.enqueue()
    stage.drain()
    assert (job.refresh().status, values[-2:], pool.used) == (Status.COMPLETED, [1, [0, 1, 2]], 0)


def test_a_job_that_rests_in_a_step_is_moved_to_another_task(stage: Stage, calls: Calls) -> None:
    @stage.task(name="first", inports=["answers"])
    def first(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.receive("answers")

    @stage.task(name="second", inports=["answers"])
    def second(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        assert job.receive("answers") == "yes"
        job.step("pack", calls, "pack")

    job = first.enqueue()
    assert stage.run(job) == Status.SUSPENDED
    job.move(task="second")
    job.input("answers").write("yes")
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"charge": 1, "pack": 1})


def test_a_batch_ends_when_its_jobs_have_passed_their_waits(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.sleep("rest", seconds=60)

    batch = stage.sidejob.batch("orders")
    with batch:
        jobs = [stage.job(body) for _ in range(2)]
    stage.drain()
    assert batch.counts.done == 0
    for job in jobs:
        pass_time(stage, job)
    stage.drain()
    assert (batch.counts.completed, calls.of["charge"]) == (2, 2)


def test_a_unique_key_is_kept_through_the_waits_of_steps(stage: Stage, calls: Calls) -> None:
    def body(job: RunningJob) -> None:
        job.step("charge", calls, "charge")
        job.sleep("rest", seconds=60)
        job.step("shaky", calls.fails, "shaky", 1, retries=1, backoff=60)

    job = stage.job(body, unique="order 1")
    for _ in range(3):
        assert stage.job(body, unique="order 1") == job
        stage.drain()
        pass_time(stage, job)
    stage.drain()
    assert job.refresh().status == Status.COMPLETED
    assert stage.job(body, unique="order 1") != job
    assert calls.of == {"charge": 1, "shaky": 2}


def test_a_recursive_termination_ends_all_that_a_limit_has_let_begin(stage: Stage, calls: Calls) -> None:
    @stage.task(name="child", inports=["go"])
    def child(job: RunningJob) -> None:
        job.receive("go")

    def body(job: RunningJob) -> None:
        job.call_all("children", [child.s() for _ in range(5)], limit=2)
        calls("behind")

    job = stage.job(body)
    stage.drain()
    children = sorted(job.children.values(), key=lambda one: one.id)
    assert [one.status for one in children] == [Status.SUSPENDED] * 2
    children[0].input("go").write(1)
    stage.run(children[0])
    job.terminate(recursive=True)
    stage.drain()
    assert job.refresh().status == Status.TERMINATED
    assert [one.refresh().status for one in job.children.values()] == [Status.TERMINATED] * 2, "no third one was called"
    assert calls.of == {}


@pytest.mark.parametrize("in_transaction", [True, False])
def test_a_durable_task_that_a_step_calls_is_in_its_transaction_or_sent_at_once(
    stage: Stage, *, in_transaction: bool
) -> None:
    @stage.app.task(name="told", durable=True, shared=False)
    def told() -> None:
        raise AssertionError("nobody runs it here")

    def body(job: RunningJob) -> None:
        with stage.connect(autocommit=False) as connection:
            with job.step("tell", transaction=connection) as step:
                if step.is_new:
                    told.apply_async(transaction=connection if in_transaction else None)
            connection.commit()

    job = stage.job(body)
    killed_at(stage, job, "step[tell]:before-commit")
    kept = "SELECT count(*) FROM messages WHERE body IS NOT NULL"
    assert stage.sql(kept) == [(0 if in_transaction else 1,)]
    assert stage.run(job) == Status.COMPLETED
    assert stage.sql(kept) == [(1 if in_transaction else 2,)]


def test_a_called_child_whose_task_has_a_retention_stays_until_the_step_has_its_value(
    stage: Stage, calls: Calls
) -> None:
    @stage.task(name="page", retention=0)
    def page(job: RunningJob, number: int) -> int:
        return int(calls(f"page {number}", number))

    job = stage.job(lambda job: sum(job.call_all("pages", [page.s(1), page.s(2)], limit=1)))
    stage.run(job)
    stage.run(job.children["pages/0"])
    assert stage.run(job) == Status.SUSPENDED
    pruner = Prune(Sweep(stage.runtime))
    assert pruner.run_once() == Report(), "the step needs the value of the first page"
    stage.drain()
    assert (job.refresh().status, calls.of) == (Status.COMPLETED, {"page 1": 1, "page 2": 1})
    assert pruner.run_once() == Report(pruned_jobs=2)


def test_a_called_child_in_the_dead_set_stays_until_its_step_has_ended(stage: Stage, calls: Calls) -> None:
    @stage.task(name="fails", retention=60)
    def fails(job: RunningJob) -> Any:
        return calls.fails("fails", 1)

    job = stage.job(lambda job: job.call("child", fails.s()))
    stage.drain()
    assert job.refresh().status == Status.FAILED
    stage.sql("UPDATE dead SET died_at = now() - interval '181 days' WHERE task = 'fails'")
    assert Prune(Sweep(stage.runtime)).run_once() == Report(), "a retry of the parent asks the child again"
    job.run(force=True)
    stage.drain()
    assert (job.refresh().status, calls.of["fails"]) == (Status.COMPLETED, 2)

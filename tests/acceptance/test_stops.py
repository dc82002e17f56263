"""Workers that stop as planned, limits and revocations: what was running is finished, given back, or ended for good."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_sidejob.jobs.job import Job
from celery_sidejob.model.errors import LeaseLostError
from celery_sidejob.model.messages import Doorbell
from celery_sidejob.model.status import RunEnd
from celery_sidejob.operations.runs import endings, runs
from celery_sidejob.operations.runs.endings import Ending
from celery_sidejob.operations.runs.runs import Unit
from celery_sidejob.services.heartbeat.heartbeat import Heartbeat
from celery_sidejob.services.heartbeat.run_ends import Stop, end_from_outside
from tests.acceptance.outage_site import Site, site_fixture, site_of  # noqa: F401 - the fixture `site`
from tests.tools.brokers import Broker
from tests.tools.commands import ask
from tests.tools.recorder import Record
from tests.tools.versions import CELERY_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

POOLS = pytest.mark.parametrize("pool", ["prefork", "solo"])
LEASE_S = 3.0


# -- stops ---------------------------------------------------------------------------------------------------------


@POOLS
def test_a_warm_stop_lets_the_job_finish(site: Site, pool: str) -> None:
    job = site.hold("gate", [1, 2])
    worker = site.start_worker(pool=pool)
    site.record.wait_for("holding", job=job.id)

    worker.terminate()
    worker.wait_for_log("Warm shutdown")
    site.open("gate")

    assert site.wait_for_end(worker) == 0
    assert site.wait_for(job, "completed")["run_no"] == 1
    site.nothing_lost()


@POOLS
def test_a_job_may_see_that_the_worker_wants_to_stop(site: Site, pool: str) -> None:
    job = site.sidejob.enqueue("outage.obey")
    worker = site.start_worker(pool=pool)
    site.record.wait_for("holding", job=job.id)

    worker.terminate()

    assert site.wait_for_end(worker) == 0
    assert len(site.record.of("stopping", job=job.id)) == 1
    assert site.wait_for(job, "completed")["run_no"] == 1


@pytest.mark.few(2)
@pytest.mark.parametrize("signals", [[signal.SIGQUIT], [signal.SIGTERM, signal.SIGQUIT]], ids=["cold", "warm, cold"])
@POOLS
def test_a_cold_stop_gives_the_runs_back(site: Site, pool: str, signals: list[signal.Signals]) -> None:
    running = site.hold("gate", [1, 2])
    waiting = site.hold("gate", [3])
    worker = site.start_worker(pool=pool)
    site.record.wait_for("holding", job=running.id)

    for number, text in zip(signals, ["shutdown (MainProcess)"] * 2, strict=False):
        worker.send_signal(number)
        if number == signal.SIGTERM:
            worker.wait_for_log("Warm " + text)
    site.wait_for_end(worker)

    row = site.wait_for(running, "queued")
    assert (row["run_no"], row["losses"]) == (1, 0)
    site.quiet()

    site.open("gate")
    site.start_worker(pool=pool, name="elsewhere")
    assert site.wait_for(running, "completed")["run_no"] == 2
    site.wait_for(waiting, "completed")
    assert [line["read"] for line in site.record.of("passed", job=running.id)] == [[1, 2]]
    site.nothing_lost()


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="runs one body at a time")
def test_a_soft_stop_tells_the_jobs_at_once(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker
) -> None:
    """As orchestrators stop a worker: some seconds for who is ready to end, then the rest is given back."""
    with site_of(
        tmp_path, processes, record, **broker.configuration, sidejob_database_url=database_url,
        worker_soft_shutdown_timeout=4.0,
    ) as site:  # fmt: skip
        ready, stubborn = site.sidejob.enqueue("outage.obey"), site.hold("gate", [1])
        worker = site.start_worker(concurrency=2, env={"REMAP_SIGTERM": "SIGQUIT"})
        for job in (ready, stubborn):
            site.record.wait_for("holding", job=job.id)

        worker.terminate()

        site.wait_for_end(worker)
        assert site.wait_for(ready, "completed")["run_no"] == 1
        row = site.wait_for(stubborn, "queued")
        assert (row["run_no"], row["losses"]) == (1, 0)
        site.open("gate")
        site.start_worker(name="elsewhere")
        assert site.wait_for(stubborn, "completed")["run_no"] == 2
        site.nothing_lost()


@pytest.mark.pools("prefork", reason="has no soft time limits")
def test_a_released_run_keeps_the_limits_of_its_asking(site: Site) -> None:
    job = site.hold("gate", soft_time_limit=5)
    worker = site.start_worker()
    site.record.wait_for("holding", job=job.id)
    worker.send_signal(signal.SIGQUIT)
    site.wait_for_end(worker)
    site.wait_for(job, "queued")

    site.start_worker(name="elsewhere")
    row = site.wait_for(job, "failed")
    assert (row["run_no"], row["error"]["type"]) == (2, "SoftTimeLimitExceeded")


# -- processes that are replaced -----------------------------------------------------------------------------------


@pytest.mark.pools("prefork", reason="replaces nothing")
def test_processes_replaced_after_each_task_lose_nothing(site: Site) -> None:
    jobs = [site.sidejob.enqueue("outage.note") for _ in range(8)]
    site.start_worker(concurrency=2, extra=["--max-tasks-per-child=1"])

    for job in jobs:
        assert site.wait_for(job, "completed")["run_no"] == 1
    assert len({line["pid"] for line in site.record.of("ran")}) == len(jobs)
    site.nothing_lost()


@pytest.mark.pools("prefork", reason="replaces nothing")
def test_processes_replaced_for_their_memory_lose_nothing(site: Site) -> None:
    jobs = [site.sidejob.enqueue("outage.swell", (200,)) for _ in range(3)]
    worker = site.start_worker(extra=["--max-memory-per-child=150000"])

    for job in jobs:
        assert site.wait_for(job, "completed")["run_no"] == 1
    assert len({line["pid"] for line in site.record.of("ran")}) == len(jobs)
    assert worker.alive
    site.nothing_lost()


# -- revocation ----------------------------------------------------------------------------------------------------


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
def test_revoking_a_running_job_ends_this_asking(site: Site, worker_pool: str) -> None:
    job = site.hold("gate", [1, 2])
    result = job.result
    site.start_worker()
    (begun,) = site.record.wait_for("holding", job=job.id)

    site.listens()
    site.app.control.revoke(job.task_id, terminate=True)

    assert_ended_as_revoked(site, job, result, run_no=1)
    assert_runs_again_when_asked(site, job, [1, 2], run_no=2)
    replaced = site.record.of("holding", job=job.id, run_no=2)[0]["pid"] != begun["pid"]
    assert replaced == (worker_pool == "prefork")


@pytest.mark.pools("prefork", "gevent", reason="cannot stop a body")
@pytest.mark.parametrize("queue", ["celery", "managed"])
def test_a_run_that_hangs_is_killed_by_command(site: Site, queue: str) -> None:
    if queue == "managed":  # there a message is a permit: that of the first job begins the one of the higher priority
        site.sidejob.queue(queue).configure(limit=1)
    other, job = site.hold("gate", queue=queue), site.hold("never", queue=queue, priority=9)
    site.start_worker(queues=queue, concurrency=2)
    for held in (job,) if queue == "managed" else (job, other):
        site.record.wait_for("holding", job=held.id)
    site.listens()

    said = ask(site.app, "terminate", job.id, "--kill")

    assert said.code == 0, said
    site.wait_for(job, "terminated")
    (shutdown,) = site.record.of("shut down", job=job.id)
    assert (shutdown["run_no"], site.record.of("passed", job=job.id)) == (2, [])
    site.open("gate")
    assert site.wait_for(other, "completed")["run_no"] == 1
    site.nothing_lost()


@pytest.mark.pools("prefork", "gevent", reason="cannot stop a body")
def test_revoking_again_and_again_counts_no_loss(site: Site) -> None:
    """More often than `sidejob_max_losses`, since a death of a process might count as a loss if it came first."""
    site.start_worker()
    job = site.hold("gate")
    for run_no in range(1, 6):
        site.record.wait_for("holding", job=job.id, run_no=run_no)
        task_id = job.refresh().task_id
        site.listens()
        site.app.control.revoke(task_id, terminate=True, signal="SIGKILL" if run_no % 2 else "SIGTERM")
        row = site.wait_for(job, "failed")
        assert (row["run_no"], row["losses"]) == (run_no, 0)
        job.run(force=True)
    site.open("gate")
    site.wait_for(job, "completed")


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
def test_revoking_a_job_that_waits_behind_another_ends_this_asking(site: Site) -> None:
    first, second = site.hold("gate"), site.hold("gate", [1])
    result = second.result
    worker = site.start_worker()
    site.record.wait_for("holding", job=first.id)

    site.listens()
    site.app.control.revoke(second.task_id)
    worker.wait_for_log("Tasks flagged as revoked")
    site.open("gate")

    assert_ended_as_revoked(site, second, result, run_no=1)
    assert site.record.of("holding", job=second.id) == []
    assert site.wait_for(first, "completed")["run_no"] == 1
    assert_runs_again_when_asked(site, second, [1], run_no=2)


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.pools("prefork", reason="has no soft time limits")
def test_a_soft_time_limit_is_a_run_that_raised(site: Site) -> None:
    job = site.hold("gate", [1, 2], soft_time_limit=1)
    site.start_worker()

    row = site.wait_for(job, "failed")

    assert (row["run_no"], row["losses"], row["error"]["type"]) == (1, 0, "SoftTimeLimitExceeded")
    assert site.rows("SELECT reason FROM dead") == [{"reason": "failed"}]
    assert_runs_again_when_asked(site, job, [1, 2], run_no=2)


@pytest.mark.pools("prefork", reason="has no soft time limits")
def test_a_soft_time_limit_that_strikes_at_the_end_of_a_run_leaves_nothing_behind(site: Site) -> None:
    """It is raised in the middle of our own statement, which waits for somebody who has locked the job."""
    job = site.hold("gate", [1], soft_time_limit=3)
    worker = site.start_worker()
    (begun,) = site.record.wait_for("holding", job=job.id)

    with site.locked(job) as waiting:
        site.open("gate")
        site.wait(waiting, 10, message="the end of the run to wait for the lock")
        worker.wait_for_log("Soft time limit")
    row = wait_until(lambda: at_rest(site, job), timeout=10, message="the job to rest")

    assert (row["run_no"], row["losses"], row["status"]) == (1, 0, "completed")
    assert len(job.input("numbers")) == 0
    for _ in range(3):  # in the same process, on the same connection or a new one
        later = site.hold("gate")
        site.wait_for(later, "completed", timeout=5)
        assert site.record.of("holding", job=later.id)[0]["pid"] == begun["pid"]


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
@pytest.mark.parametrize("concurrency", [1, 2])
def test_revoking_ends_the_run_though_a_copy_of_its_message_came(site: Site, concurrency: int) -> None:
    """With one process the copy waits in the queue; with two it is found stale before the revocation."""
    job = site.hold("gate")
    worker = site.start_worker(concurrency=concurrency)
    site.record.wait_for("holding", job=job.id)
    site.sidejob.runtime.publisher.publish([Doorbell(job.id, 1, job.task_id, job.task, job.queue)])
    if concurrency > 1:
        worker.wait_for_log("ignored")

    site.listens()
    site.app.control.revoke(job.task_id, terminate=True)

    row = site.wait_for(job, "failed")
    assert (row["run_no"], row["losses"], row["error"]["type"]) == (1, 0, "TaskRevokedError")


@pytest.mark.pools("prefork", "threads", "asyncio", "awaited", "gevent", reason="hears nothing while it runs a body")
def test_revoking_a_job_that_somebody_has_locked_holds_up_nothing_else(
    tmp_path: Path, processes: Processes, record: Record, database_url: str, broker: Broker
) -> None:
    with site_of(
        tmp_path, processes, record, **broker.configuration, sidejob_database_url=database_url, sidejob_lease=LEASE_S,
        sidejob_heartbeat_interval=0.5,
    ) as site:  # fmt: skip
        revoked, other = site.hold("gate", [1]), site.hold("gate", [2])
        site.start_worker(concurrency=2)
        for job in (revoked, other):
            site.record.wait_for("holding", job=job.id)

        with site.locked(revoked) as waiting:
            site.listens()
            site.app.control.revoke(revoked.task_id, terminate=True)
            site.wait(waiting, 10, message="the end of the run to wait for the lock")
            beats = site.rows("SELECT beat_at FROM workers")[0]["beat_at"]
            wait_until(
                lambda: site.rows("SELECT 1 FROM workers WHERE beat_at > %s + interval '1.2 s' * 3", beats),
                timeout=3 * LEASE_S,
                message="the worker to beat on for longer than its lease",
            )

        row = site.wait_for(revoked, "failed")
        assert (row["run_no"], row["losses"], row["error"]["type"]) == (1, 0, "TaskRevokedError")
        site.open("gate")
        assert site.wait_for(other, "completed")["run_no"] == 1
        site.quiet()


@pytest.mark.pools("prefork", reason="has no soft time limits")
def test_a_hard_time_limit_is_a_run_that_raised(site: Site) -> None:
    job = site.hold("gate", [1, 2], task="outage.deaf", soft_time_limit=1, time_limit=2)
    result = job.result
    other = site.sidejob.enqueue("outage.note")
    site.start_worker()

    row = site.wait_for(job, "failed")

    assert (row["run_no"], row["losses"], row["error"]["type"]) == (1, 0, "TimeLimitExceeded")
    assert len(site.record.of("warned", job=job.id)) == 1
    assert site.rows("SELECT reason FROM dead") == [{"reason": "failed"}]
    wait_until(lambda: result.state == "FAILURE", message="the result to be stored")
    site.wait_for(other, "completed")
    assert_runs_again_when_asked(site, job, [1, 2], run_no=2, event="holding")


def test_what_a_process_commits_after_its_run_was_ended_is_refused(site: Site) -> None:
    runtime = site.sidejob.runtime
    job = site.hold("gate", [1])
    heartbeat = Heartbeat(runtime)
    heartbeat.register()
    try:
        hold = runs.claim(runtime, job.id, task=job.task, for_run=1, worker_id=heartbeat.worker_id)
        assert hold is not None
        runs.commit(runtime, hold, Unit())

        stop = Stop("TimeLimitExceeded", "The run took longer than 1 second.")
        end_from_outside(runtime, (job.id, 1), job.task, stop, worker_id=heartbeat.worker_id)

        assert site.job_row(job)["status"] == "failed"
        with pytest.raises(LeaseLostError):
            runs.commit(runtime, hold, Unit())
        with pytest.raises(LeaseLostError):
            endings.end(runtime, hold, Unit(), Ending(RunEnd.COMPLETED))
    finally:
        heartbeat.leave()
        heartbeat.close()
    assert site.job_row(job)["status"] == "failed"
    assert len(job.input("numbers")) == 1


@CELERY_5_7  # before, Celery stores FAILURE over what was stored
@POOLS
def test_an_asking_that_expired_before_it_began_is_revoked(site: Site, pool: str) -> None:
    job = site.hold("gate", [1], expires=0.01)
    result = job.result
    site.start_worker(pool=pool)

    assert_ended_as_revoked(site, job, result, run_no=1)
    assert site.record.of("holding", job=job.id) == []
    assert_runs_again_when_asked(site, job, [1], run_no=2)


def at_rest(site: Site, job: Job) -> dict[str, Any] | None:
    """Return the job's row if it is finished."""
    row = site.job_row(job)
    return row if row["status"] in ("completed", "failed") and row["unit_no"] is None else None


# -- what is checked -----------------------------------------------------------------------------------------------


def assert_ended_as_revoked(site: Site, job: Job, result: Any, *, run_no: int) -> None:
    """The asking ended as failed, and its result says REVOKED."""
    row = site.wait_for(job, "failed")
    assert (row["run_no"], row["losses"], row["error"]["type"]) == (run_no, 0, "TaskRevokedError")
    assert site.rows("SELECT reason FROM dead WHERE job_id = %s", job.id) == [{"reason": "revoked"}]
    wait_until(lambda: result.state == "REVOKED", message="the result to be stored")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=5)


def assert_runs_again_when_asked(
    site: Site, job: Job, numbers: list[int], *, run_no: int, event: str = "passed"
) -> None:
    """A later asking runs, and finds the inputs as they were."""
    assert job.run(force=True) is not None
    site.open("gate")
    assert site.wait_for(job, "completed")["run_no"] == run_no
    assert [line["read"] for line in site.record.of(event, job=job.id, run_no=run_no)] == [numbers]
    assert site.rows("SELECT id FROM dead WHERE job_id = %s", job.id) == []

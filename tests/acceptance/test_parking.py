"""A deployment takes a task away, or brings it, while jobs of it wait: real workers with and without the task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_sidejob import Job, UnknownTaskError
from celery_sidejob.model.status import Gate
from tests.tools.brokers import Broker
from tests.tools.in_process import Stage
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.acceptance.parking_app"
OLD, NEW = "parking.old", "parking.new"
PARKED = f"gate = {Gate.WORKER}"


class Site:
    """Workers of both deployments, and a client that has the code of neither."""

    def __init__(self, database_url: str, broker: Broker, processes: Processes, record: Record) -> None:
        self._env = {"SIDEJOB_DATABASE_URL": database_url, **broker.env, **record.env}
        self.client = Stage(
            database_url, broker=broker.url, **broker.configuration, task_default_queue="parking", sidejob_lost_after=3,
            sidejob_durable_tasks=["plain.*"],
        )  # fmt: skip
        self.sidejob = self.client.sidejob
        self.client.declare_dead(self.client.worker_id)
        self.record = record
        self._processes = processes

    def worker(self, *knows: str, env: dict[str, str] | None = None, **options: Any) -> WorkerProcess:
        """Start a worker that knows these tasks."""
        return self._processes.start_worker(
            APP, env={**self._env, "PARKING_KNOWS": ",".join(knows), **(env or {})}, **options
        )

    def known(self, *tasks: str) -> None:
        """Have tasks announced by workers that have stopped since."""
        worker = self.worker(*tasks)
        wait_until(lambda: len(self.client.sql("SELECT 1 FROM registry")) == len(tasks), message="the tasks")
        worker.terminate()
        assert worker.wait(30) == 0

    def wait_until_parked(self, *jobs: Job) -> None:
        """Wait until these jobs are, and no others."""
        wanted = [(job.id,) for job in jobs]
        wait_until(
            lambda: self.client.sql(f"SELECT job_id FROM messages WHERE {PARKED} ORDER BY job_id") == wanted,
            timeout=15, message="the jobs to be parked",
        )  # fmt: skip

    def wait_until_released(self, timeout: float) -> None:
        wait_until(
            lambda: self.client.sql(f"SELECT 1 FROM messages WHERE {PARKED}") == [],
            timeout=timeout,
            message="nothing to be parked",
        )


@pytest.fixture
def site(database_url: str, broker: Broker, processes: Processes, record: Record) -> Iterator[Site]:
    made = Site(database_url, broker, processes, record)
    try:
        yield made
        assert made.client.broken_rules() == []
    finally:
        made.client.close()


@pytest.mark.few(2)
@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
def test_a_job_waits_for_the_deployment_that_has_its_task(site: Site) -> None:
    with pytest.raises(UnknownTaskError, match=r"No sidejob task .parking\.new. is registered"):
        site.sidejob.enqueue(NEW)
    with site.sidejob.subscribe("/sidejob/workers/parking", timeout=20) as told:
        site.known(NEW)
        assert list(next(told).message) == [NEW]
    jobs = [site.sidejob.enqueue(NEW) for _ in range(3)]
    assert jobs[0].waiting_for == ["no worker"]

    without = site.worker(OLD)
    site.wait_until_parked(*jobs)
    without.wait_for_log(f"Job {jobs[0].id} is parked")
    assert [job.waiting_for for job in jobs] == [["no worker"]] * 3
    assert [job.result.state for job in jobs] == ["PENDING"] * 3, "Celery would call it a failure"
    row = "SELECT published_at, next_check_at::text, due_at, losses FROM messages"
    waiting = site.client.sql(row)
    other = site.sidejob.enqueue(OLD)
    other.wait(timeout=20)
    assert site.client.sql(row) == waiting

    site.worker(NEW)
    site.wait_until_released(timeout=8)
    for job in jobs:  # the worker without the task takes about every second message, which is sent again in seconds
        assert job.wait(timeout=60).status == "completed"
    assert [job.waiting_for for job in jobs] == [[]] * 3
    assert len(site.record.of("ran", name=NEW)) == 3
    assert site.client.row_counts()["messages"] == 0
    assert without.log().count("is parked: no worker") == 3
    without.terminate()
    assert without.wait(30) == 0
    assert site.sidejob.stats()["counters"]["jobs_parked"] == 3


@pytest.mark.few(0)
@pytest.mark.brokers("redis", "sidejobpg")
def test_while_both_deployments_run_every_job_runs_soon(site: Site) -> None:
    site.known(NEW)
    site.worker(OLD)
    site.worker(NEW)
    wait_until(lambda: len(site.client.sql("SELECT 1 FROM served")) >= 2, message="both to say what they serve")
    jobs = [site.sidejob.enqueue(NEW) for _ in range(6)]
    for job in jobs:
        job.wait(timeout=40)
    assert site.client.row_counts()["messages"] == 0


@pytest.mark.few(2)
@pytest.mark.pools("prefork", reason="the worker's parent is killed, whatever its pool is")
@pytest.mark.parametrize(
    ("who", "point"),
    [
        (OLD, "park:before-commit"), (OLD, "park:after-commit"), (NEW, "serve:before-commit"),
        (NEW, "serve:after-commit"),
    ],
)  # fmt: skip
def test_a_worker_that_dies_while_it_parks_or_registers_leaves_nothing_parked_for_ever(
    site: Site, tmp_path: Path, who: str, point: str
) -> None:
    site.known(NEW)
    job = site.sidejob.enqueue(NEW)
    dies = {"SIDEJOB_CRASH_POINTS": f"{point}=kill", "SIDEJOB_CRASH_ONCE": str(tmp_path / "acted")}
    if who == NEW:
        site.worker(OLD)
        site.wait_until_parked(job)
    site.worker(who, env=dies, ready_timeout=None)
    wait_until(lambda: (tmp_path / "acted").exists(), timeout=20, message="the worker to die")
    site.worker(OLD)
    site.worker(NEW)
    assert job.wait(timeout=60).status == "completed"
    assert site.client.row_counts()["messages"] == 0


@pytest.mark.few(0)
def test_a_parked_job_that_is_terminated_is_told_of(site: Site) -> None:
    site.known(NEW)
    jobs = [site.sidejob.enqueue(NEW) for _ in range(2)]
    without = site.worker(OLD)
    site.wait_until_parked(*jobs)
    late, now = jobs
    late.terminate()
    assert now.terminate(without_shutdown=True).status == "terminated"
    assert late.refresh().status == "terminating"
    site.client.sql("UPDATE messages SET declined_at = now() - interval '61 s'")
    assert late.wait(timeout=20).status == "terminated"
    without.wait_for_log(f"Job {late.id} was terminated without its shutdown")
    assert site.record.of("shut down") == []


def test_the_shutdown_of_a_parked_job_runs_if_its_deployment_is_back_in_time(site: Site) -> None:
    site.known(NEW)
    job = site.sidejob.enqueue(NEW)
    site.worker(OLD)
    site.wait_until_parked(job)
    job.terminate()
    site.worker(NEW)
    assert job.wait(timeout=20).status == "terminated"
    assert [event["job"] for event in site.record.of("shut down")] == [job.id]


# -- durable tasks ---------------------------------------------------------------------------------------------------

PLAIN = "plain.new"


@pytest.mark.few(2)
@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
def test_durable_tasks_wait_for_the_deployment_that_knows_them(site: Site) -> None:
    old = site.worker(OLD)
    results = [site.client.app.send_task(PLAIN, (number,)) for number in range(3)]
    parked = f"SELECT task_id FROM messages WHERE {PARKED} ORDER BY 1"
    wanted = sorted((result.id,) for result in results)
    wait_until(lambda: site.client.sql(parked) == wanted, timeout=20, message="the tasks to be parked")
    old.wait_for_log(f"Task {results[0].id} is parked: no worker of queue parking knows the task {PLAIN}")
    assert [result.state for result in results] == ["PENDING"] * 3, "Celery would call it a failure"

    site.worker(OLD, PLAIN)
    site.wait_until_released(timeout=8)
    results += [site.client.app.send_task(PLAIN, (number,)) for number in range(3, 12)]  # of which the old gets some
    wait_until(lambda: site.client.row_counts()["messages"] == 0, timeout=60, message="all to run")
    assert sorted(event["id"] for event in site.record.of("ran")) == sorted(result.id for result in results)
    assert site.sidejob.dead.list() == []


@pytest.mark.few(2)
@pytest.mark.brokers("redis", "sidejob", "amqp", "sidejobpg")
def test_a_message_that_old_workers_cannot_read_waits_for_new_ones(site: Site) -> None:
    old = site.worker(PLAIN)
    result = site.client.app.send_task(PLAIN, ({1},), serializer="pickle")
    old.wait_for_log(f"Task {result.id} ({PLAIN}) is not run here: this worker cannot read its message (Content")
    newer = {"task": "plain.newest", "id": "newer", "lang": "py", "sidejob_durable": {"v": 2}}
    with site.client.app.producer_pool.acquire() as producer:
        producer.publish([[], {}, {}], routing_key="parking", headers=newer, serializer="json")
    old.wait_for_log("A message of plain.newest is left to newer workers: it is of a newer format")
    assert site.client.app.AsyncResult("newer").state == "PENDING", "Celery would call it a failure"
    assert result.state == "PENDING"
    assert site.sidejob.dead.list() == []

    site.worker(PLAIN, env={"PARKING_READS": "json,pickle", "C_FORCE_ROOT": "1"})
    wait_until(lambda: site.client.row_counts()["messages"] == 0, timeout=60, message="it to run")
    assert [event["id"] for event in site.record.of("ran")] == [result.id]

"""What people see of real workers: totals, log lines, monitoring events, traces, reports of errors."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider

from celery_sidejob import Job
from celery_sidejob.store import registry
from celery_sidejob.store.statement import Statement
from tests.acceptance.observed_app import SECRET
from tests.acceptance.scene import QUICK
from tests.tools.apps import make_app
from tests.tools.brokers import Broker
from tests.tools.monitor import Events
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

APP = "tests.acceptance.observed_app"


class Watched:
    """A worker that is watched, and a client."""

    def __init__(self, database_url: str, broker: Broker, record: Record, processes: Processes) -> None:
        self.record = record
        self._processes = processes
        self.broker = broker
        self.env = {"SIDEJOB_DATABASE_URL": database_url, **broker.env, **record.env, **QUICK}
        self.app = make_app(
            "observed",
            broker=None,
            **broker.configuration,
            sidejob_database_url=database_url,
            task_default_queue="observed",
            task_send_sent_event=True,
        )
        self.sidejob = self.app.sidejob

    def worker(self, *, pool: str | None = None, extra: tuple[str, ...] = (), **env: str) -> WorkerProcess:
        """Start a worker with further variables."""
        return self._processes.start_worker(APP, env={**self.env, **env}, pool=pool, queues="observed", extra=extra)

    def enqueue(self, task: str, *args: Any, **options: Any) -> Job:
        """Make a job."""
        return self.sidejob.enqueue(f"observed.{task}", args, **options)

    def rest(self, job: Job, status: str) -> None:
        """Wait until the job has this status."""
        wait_until(lambda: job.refresh().status == status, timeout=20, message=f"job {job.id} to be {status}")

    def stats(self) -> dict[str, Any]:
        """What `stats` says."""
        return self.sidejob.stats()


@pytest.fixture
def watched(database_url: str, broker: Broker, record: Record, processes: Processes) -> Iterator[Watched]:
    """A worker to be watched."""
    made = Watched(database_url, broker, record, processes)
    yield made
    made.sidejob.close()
    made.app.close()


# -- totals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_a_worker_stores_what_it_counts_and_which_queues_it_serves(watched: Watched, pool: str) -> None:
    worker = watched.worker(pool=pool)
    jobs = [watched.enqueue("work") for _ in range(5)]
    failed = watched.enqueue("fail", "x")
    for job in jobs:
        watched.rest(job, "completed")
    watched.rest(failed, "failed")

    def stored() -> bool:
        found = watched.stats()
        return bool(
            1 <= found["durations"]["claim-page"]["count"] <= 6
            and found["durations"]["end"]["count"] == 6
            and found["counters"]["status_changes"].get("completed") == 5
            and found["counters"]["status_changes"].get("running") == 6
            and found["counters"]["jobs_buried"] == {"failed": 1}
        )

    wait_until(stored, timeout=15, message=f"the totals of 6 runs, not {watched.stats()}")
    found = watched.stats()
    assert found["queues"]["observed"]["workers"] == 1
    assert 0 < found["durations"]["claim-page"]["p50_s"] < 5
    assert 0 < found["durations"]["end"]["sum_s"] < 60

    worker.terminate()
    assert worker.wait(40) == 0
    assert watched.stats()["counters"] == found["counters"], "nothing is stored twice, whoever says goodbye"


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
def test_totals_outlive_their_workers(watched: Watched) -> None:
    worker = watched.worker()
    job = watched.enqueue("hold")
    watched.record.wait_for("holding", job=job.id)
    os.kill(worker.children()[0], signal.SIGKILL)
    watched.record.wait_for("holding", job=job.id, count=2)
    watched.record.note("go", job=job.id)
    watched.rest(job, "completed")

    wait_until(
        lambda: (watched.stats()["counters"]["runs_lost"], watched.stats()["counters"]["runs_rescued"]) == (1, 1),
        timeout=15, message="the loss and the rescue to be stored",
    )  # fmt: skip
    worker.kill_group()
    assert watched.stats()["counters"]["runs_rescued"] == 1


def test_a_worker_stores_what_is_left_when_it_stops(watched: Watched) -> None:
    worker = watched.worker()
    watched.rest(watched.enqueue("work"), "completed")
    worker.terminate()
    worker.wait(40)

    assert watched.stats()["durations"]["end"]["count"] == 1


def test_queues_are_noted_when_they_change(watched: Watched) -> None:
    worker = watched.worker()
    wait_until(lambda: watched.stats()["queues"].get("observed", {}).get("workers") == 1, timeout=10)

    watched.app.control.add_consumer("more", destination=[worker.nodename], reply=True, timeout=5)
    wait_until(lambda: watched.stats()["queues"].get("more", {}).get("workers") == 1, timeout=10)
    (known,) = watched.sidejob.runtime.connections.run(Statement("SELECT tasks FROM {served}"))
    assert {"observed.work", "celery.chord"} <= set(known.tasks)
    watched.app.control.cancel_consumer("observed", destination=[worker.nodename], reply=True, timeout=5)
    wait_until(lambda: "observed" not in watched.stats()["queues"], timeout=10)


def test_the_doctor_finds_a_real_worker_well(watched: Watched, processes: Processes) -> None:
    watched.worker()
    watched.rest(watched.enqueue("work"), "completed")
    wait_until(lambda: watched.stats()["queues"].get("observed", {}).get("workers") == 1, timeout=10)
    watched.enqueue("hold")
    doctor = processes.start(
        [sys.executable, "-m", "celery", "-A", APP, "sidejob", "doctor", "--json"], env=watched.env
    )

    code = doctor.wait(30)
    found = json.loads(doctor.log())
    bad = [finding for finding in found["findings"] if finding["level"] != "ok"]
    assert [finding["check"] for finding in bad] in ([], ["durability"]), "the servers of tests need not write to disk"
    assert code == len(bad)
    of_broker = "eviction" if watched.broker.is_redis else "rabbitmq" if watched.broker.is_amqp else "horizon"
    assert {finding["check"] for finding in found["findings"]} >= {"broker", of_broker, "liveness", "queues"}


# -- logging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_records_of_a_run_carry_its_job(watched: Watched, pool: str) -> None:
    worker = watched.worker(pool=pool)
    job = watched.enqueue("work")
    watched.rest(job, "completed")

    worker.wait_for_log(f"TASK job={job.id} run=1 id={job.task_id} working")
    worker.wait_for_log(f"LOG job={job.id} run=1 a.library deep below")
    worker.wait_for_log("LOG job=None run=None celery.apps.worker")


def test_each_status_change_is_one_line_of_json(watched: Watched, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    worker = watched.worker(EVENTS_LOG=str(path))
    done, failed, rested = watched.enqueue("work"), watched.enqueue("fail", "x"), watched.enqueue("rest")
    watched.rest(done, "completed")
    watched.rest(failed, "failed")
    watched.rest(rested, "suspended")
    worker.terminate()
    worker.wait(40)

    moves: dict[int, list[tuple[str, str]]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert record.keys() >= {"at", "level", "logger", "message", "task"}
        assert record["logger"] == "celery_sidejob.events"
        assert (record["run_no"], len(record["task_id"])) == (1, 36)
        moves.setdefault(record["job_id"], []).append((record["before"], record["after"]))
    assert moves == {
        done.id: [("queued", "running"), ("running", "completed")],
        failed.id: [("queued", "running"), ("running", "failed")],
        rested.id: [("queued", "running"), ("running", "suspended")],
    }


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_nothing_that_is_redacted_is_in_a_log(watched: Watched, pool: str) -> None:
    worker = watched.worker(pool=pool, REDACT="1")
    failed = watched.enqueue("fail", SECRET)
    retried = watched.enqueue("again", SECRET)
    rested = watched.enqueue("rest")
    watched.rest(failed, "failed")
    watched.rest(retried, "completed")
    watched.rest(rested, "suspended")
    rested.terminate()
    watched.rest(rested, "terminated")

    worker.wait_for_log("raised unexpected: ValueError('no entry with [hidden]')")
    worker.wait_for_log("ValueError: no entry with [hidden]")
    worker.wait_for_log("The shutdown of job")
    worker.wait_for_log("RuntimeError: cannot leave [hidden]")
    worker.wait_for_log("not yet with [hidden]")
    assert SECRET not in worker.log()


def test_a_message_of_a_client_without_this_package_is_redacted_too(watched: Watched, broker: Broker) -> None:
    worker = watched.worker(extra=("-E",), REDACT="1")
    with Events(broker.url) as events:
        stranger = Celery("stranger", set_as_current=False)
        stranger.conf.update(broker.configuration)
        result = stranger.send_task("observed.work", args=[SECRET], queue="observed")
        stranger.close()
        found = events.wait_for(result.id, "SUCCESS")

    assert SECRET not in json.dumps(events.raw)
    assert SECRET not in worker.log()
    assert "[hidden]" in json.dumps(events.raw), "the arguments that it had published are shown as redacted"
    assert found.name == "observed.work"


# -- monitoring events -----------------------------------------------------------------------------------------------


def test_a_monitor_derives_the_right_states(watched: Watched, broker: Broker) -> None:
    worker = watched.worker(extra=("-E",), REDACT="1")
    with Events(broker.url) as events:
        done, failed = watched.enqueue("work", 1), watched.enqueue("fail", SECRET)
        retried, rested = watched.enqueue("again"), watched.enqueue("rest")
        revoked = watched.enqueue("work", countdown=2)
        watched.app.control.revoke(revoked.task_id, destination=[worker.nodename], reply=True, timeout=5)

        task = events.wait_for(done.task_id, "SUCCESS")
        assert (task.name, task.args, task.kwargs) == ("observed.work", f"(job {done.id})", "{}")
        assert (task.worker.hostname, task.queue) == (worker.nodename, "observed")
        assert sorted(events.types(done.task_id)) == sorted(
            ["task-sent", "task-received", "task-started", "task-succeeded"]
        )

        task = events.wait_for(failed.task_id, "FAILURE")
        assert task.exception == "ValueError('no entry with [hidden]')"
        assert "no entry with [hidden]" in task.traceback

        events.wait_for(retried.task_id, "SUCCESS")
        assert "task-retried" in events.types(retried.task_id)
        assert events.types(retried.task_id).count("task-started") == 2

        events.wait_for(rested.task_id, "SUSPENDED")
        events.wait_for(revoked.task_id, "REVOKED")
        assert SECRET not in json.dumps(events.raw)

        rested.run()
        events.wait_for(rested.task_id, "SUCCESS")
        again = watched.enqueue("rest")
        events.wait_for(again.task_id, "SUSPENDED")
        again.terminate()
        events.wait_for(again.task_id, "TERMINATED")


# -- OpenTelemetry and Sentry ----------------------------------------------------------------------------------------


@pytest.fixture
def tracer() -> Iterator[Any]:
    """A tracer of this process, whose context goes along with what is published here."""
    provider = TracerProvider()
    CeleryInstrumentor().instrument(tracer_provider=provider)
    yield provider.get_tracer("test")
    CeleryInstrumentor().uninstrument()


@pytest.mark.pools("prefork", "solo", reason="sends no worker_process_init, where the tracer is begun")
def test_the_trace_of_who_asks_goes_on_in_the_run_and_in_its_children(watched: Watched, tracer: Any) -> None:
    worker = watched.worker(OTEL="1")
    with tracer.start_as_current_span("request") as span:
        trace = f"{span.get_span_context().trace_id:032x}"
        job = watched.enqueue("trace", True)
    alone = watched.enqueue("trace")

    (child,) = wait_until(lambda: list(job.refresh().children.values()), timeout=20)
    for one in (job, child):
        (noted,) = watched.record.wait_for("span", job=one.id, timeout=20)
        assert noted["trace"] == trace
        (step,) = watched.record.wait_for("step", job=one.id, timeout=20)
        assert (step["name"], step["parent"]) == ("step/look", noted["span"]), "a step is a span below its run"
    (other,) = watched.record.wait_for("span", job=alone.id, timeout=20)
    assert other["trace"] not in (trace, "0" * 32)
    assert "Traceback" not in worker.log()


@pytest.mark.pools("prefork", "solo", reason="sends no worker_process_init, where the tracer is begun")
def test_the_trace_survives_a_publication_by_the_sweeper(watched: Watched, tracer: Any) -> None:
    """The client cannot reach the broker, so that its job's message is published by the worker, and again."""
    worker = watched.worker(OTEL="1")
    watched.sidejob.runtime.connections.close()
    lonely = make_app(
        "observed", broker="redis://127.0.0.1:1/0", sidejob_database_url=watched.app.conf.sidejob_database_url
    )
    sidejob = lonely.sidejob
    with tracer.start_as_current_span("request") as span:
        trace = f"{span.get_span_context().trace_id:032x}"
        job = sidejob.enqueue("observed.trace", headers={"mine": "kept"})
    assert job.refresh().status == "queued"

    (noted,) = watched.record.wait_for("span", job=job.id, timeout=20)
    sidejob.close()
    assert noted["trace"] == trace
    assert "Traceback" not in worker.log()


def test_a_header_that_cannot_be_kept_is_in_nobodys_way(watched: Watched) -> None:
    def receiver(headers: dict[str, Any], **_: Any) -> None:
        headers.update(good="yes", bad=object())

    signals.before_task_publish.connect(receiver)
    try:
        watched.worker()
        job = watched.enqueue("work")
        watched.rest(job, "completed")
    finally:
        signals.before_task_publish.disconnect(receiver)


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_failed_job_is_reported_to_sentry_once(watched: Watched, pool: str) -> None:
    worker = watched.worker(pool=pool, SENTRY="1")
    rested, retried, done = watched.enqueue("rest"), watched.enqueue("again"), watched.enqueue("work")
    failed = watched.enqueue("fail", "x")
    watched.rest(rested, "suspended")
    watched.rest(retried, "completed")
    watched.rest(done, "completed")
    watched.rest(failed, "failed")
    watched.record.wait_for("reported", timeout=20)
    worker.terminate()  # it sends what is left first
    worker.wait(40)

    assert [(line["type"], line["message"]) for line in watched.record.of("reported")] == [("ValueError", "None")]


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_drain_waits_for_what_workers_do(watched: Watched, processes: Processes) -> None:
    worker = watched.worker()
    held, rested, later = watched.enqueue("hold"), watched.enqueue("rest"), watched.enqueue("work", countdown=3600)
    watched.record.wait_for("holding", job=held.id)
    drain = processes.start(
        [sys.executable, "-m", "celery", "-A", APP, "sidejob", "drain", "--timeout", "60"], env=watched.env
    )
    drain.wait_for_log("Not finished: observed (1 queued, 1 running)")
    watched.record.note("go", job=held.id)

    assert drain.wait(30) == 0
    assert "No run is due or in progress. Left: 1 suspended job, 1 timer" in drain.log()
    assert [str(job.refresh().status) for job in (held, rested, later)] == ["completed", "suspended", "queued"]
    assert worker.alive


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_without_sidejob_a_decorated_task_says_what_is_missing(
    watched: Watched, processes: Processes, pool: str
) -> None:
    served = [{"task": "observed.work", "queue": "observed", "options": '{"inports": {}, "outports": {}}'}]
    registry.register(watched.sidejob.runtime.connections, served)
    left = processes.start_worker(
        "tests.acceptance.left_app", env=dict(watched.broker.env), pool=pool, queues="observed"
    )
    missing = "observed.work is a sidejob task, but its app has no SideJob: call SideJob(app)."

    job = watched.enqueue("work")
    if not watched.broker.is_store:  # else it is given no message that leads to a row
        left.wait_for_log(missing, timeout=20)
    assert job.refresh().status == "queued", "it waits for a worker that can run it"
    send = watched.app.send_task
    assert send("observed.ask", queue="observed").get(timeout=20) == f"SettingsError: {missing}"
    assert send("observed.plain", queue="observed").get(timeout=20) == "done"

    left.terminate()
    left.wait(40)
    watched.worker()
    watched.rest(job, "completed")

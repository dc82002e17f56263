"""Who is there, since when, with which queues, and what each runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from celery_sidejob.store import registry, workers
from tests.tools.commands import ask
from tests.tools.in_process import Stage


def test_who_is_there_and_what_each_runs(stage: Stage) -> None:
    stage.app.conf.sidejob_durable_tasks = ["mail"]
    connections, other = stage.runtime.connections, stage.new_worker()
    registry.note_served(connections, stage.worker_id, queues=["b", "a"], tasks=[])
    first, second = stage.job(), stage.job()
    assert stage.claim(second)
    assert stage.claim(first)
    stage.app.send_task("mail", task_id="m")
    stage.sql("UPDATE messages SET locked_by = %s, locked_at = now() WHERE task_id = 'm'", other)

    one, two = stage.sidejob.workers()

    assert (one.queues, one.running) == (["a", "b"], [second, first])
    assert (two.queues, [result.id for result in two.running]) == ([], ["m"])
    assert [run.task for run in (*one.runs, *two.runs)] == ["stage.idle", "stage.idle", "mail"]
    assert one.name != two.name
    assert timedelta(0) <= datetime.now(UTC) - one.started_at < timedelta(minutes=5)
    assert one.started_at <= one.heard_at


def test_what_has_ended_or_was_taken_is_run_by_nobody(stage: Stage) -> None:
    job = stage.job()
    hold = stage.claim(job)
    assert hold is not None
    assert [worker.running for worker in stage.sidejob.workers()] == [[job]]

    stage.perform(hold)

    assert [worker.running for worker in stage.sidejob.workers()] == [[]]


def test_a_worker_that_stopped_or_died_is_not_there(stage: Stage) -> None:
    dead, stopped = stage.new_worker(), stage.new_worker()
    job = stage.job()
    assert stage.claim(job, worker_id=dead)
    stage.declare_dead(dead)
    workers.leave(stage.runtime.connections, stopped)

    (here,) = stage.sidejob.workers()

    assert here.running == []


def test_the_command_lists_them(stage: Stage) -> None:
    job = stage.job()
    assert stage.claim(job)
    stage.sql("UPDATE messages SET locked_at = now() - interval '1 h'")
    (worker,) = stage.sidejob.workers()

    lines = ask(stage.app, "workers").lines
    assert any(worker.name[:8] in line and f"job {job.id} stage.idle, 60 min" in line for line in lines)
    (document,) = ask(stage.app, "workers", "--json").document
    (run,) = document["running"]
    assert (document["name"], run["job"], run["task_id"], run["task"]) == (worker.name, job.id, None, "stage.idle")
    assert 3600 <= run["lasts_s"] < 3700
    workers.leave(stage.runtime.connections, stage.worker_id)
    assert ask(stage.app, "workers").lines == ["No worker is alive."]

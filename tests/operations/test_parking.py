"""Parking a job and telling what a worker serves take turns: no job stays parked that somebody serves."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from celery_sidejob import Job
from celery_sidejob.operations import parking
from celery_sidejob.store import parked, served, workers
from celery_sidejob.store.statement import Transaction
from tests.tools.in_process import Stage

TASK = "stage.idle"


def park(stage: Stage, job: Job, *, for_run: int = 1, task: str = TASK) -> None:
    parking.park(stage.runtime, job.id, for_run=for_run, task=task)


def serve(stage: Stage, *, tasks: Any = (TASK,), queues: Any = ("celery",)) -> int:
    return stage.runtime.connections.transact(
        "serve", partial(parking.serve, worker_id=stage.worker_id, queues=queues, tasks=tasks)
    )


def is_parked(stage: Stage, job: Job) -> bool:
    found = stage.sql("SELECT 1 FROM parked WHERE job_id = %s", job.id)
    [(never,)] = stage.sql(f"SELECT due_at = {parked.NEVER} FROM messages WHERE job_id = %s", job.id)
    assert never is bool(found)
    return bool(found)


def test_a_parked_job_goes_on_when_its_task_is_served_in_its_queue(stage: Stage) -> None:
    job = stage.job()
    park(stage, job)
    assert is_parked(stage, job)
    assert stage.broken_rules() == []
    assert serve(stage, queues=["another"]) == 0
    assert serve(stage, tasks=["another"]) == 0
    assert is_parked(stage, job)
    assert serve(stage) == 1
    assert not is_parked(stage, job)
    stage.drain()
    assert job.refresh().status == "completed"


def test_a_job_whose_task_a_live_worker_serves_is_not_parked(stage: Stage) -> None:
    job = stage.job()
    serve(stage)
    park(stage, job)
    assert not is_parked(stage, job)
    workers.leave(stage.runtime.connections, stage.worker_id)
    park(stage, job)
    assert is_parked(stage, job)


def test_a_stale_message_parks_nothing(stage: Stage) -> None:
    job = stage.job()
    park(stage, job, for_run=2)
    park(stage, job, task="another.task")
    assert not is_parked(stage, job)
    hold = stage.claim(job)
    park(stage, job)
    assert not is_parked(stage, job)
    stage.perform(hold)


def test_force_and_terminate_ask_for_a_parked_job_anew(stage: Stage) -> None:
    job = stage.job()
    park(stage, job)
    job.run()
    assert is_parked(stage, job), "a plain ask changes nothing"
    assert job.run(force=True)
    [(due,)] = stage.sql("SELECT due_at <= now() FROM messages")
    assert due
    park(stage, job)
    job.terminate()
    [(due,)] = stage.sql("SELECT due_at <= now() FROM messages")
    assert due


@pytest.mark.parametrize("first", ["park", "serve"])
def test_who_comes_second_sees_what_the_first_has_committed(stage: Stage, first: str) -> None:
    job = stage.job()
    second = {"park": lambda: serve(stage), "serve": lambda: park(stage, job)}[first]
    connections = stage.runtime.connections

    def work(executor: Transaction) -> None:
        parked.take_turn(executor)
        other.start()
        stage.wait_for_waiters()
        if first == "park":
            assert parked.park(executor, job.id, for_run=1, task=TASK) is not None
        else:
            served.serve(executor, stage.worker_id, queues=["celery"], tasks=[TASK])

    other = threading.Thread(target=second)
    connections.transact("first", work)
    other.join()
    assert not is_parked(stage, job)
    stage.drain()
    assert job.refresh().status == "completed"

"""A worker of the pool solo has one process: what is delivered while it runs a body is not begun within that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import _state
from celery.concurrency.solo import TaskPool
from celery.worker.request import create_request_cls
from kombu.utils.imports import symbol_by_name

from celery_sidejob import Job
from celery_sidejob.hooks.worker.delivered import Delivered
from celery_sidejob.model.durable import WORKER
from tests.tools.in_process import Stage


class Worker:
    """What takes deliveries from a queue in memory, as Celery's strategy does."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.pool = TaskPool(app=stage.app)
        self._connection = stage.app.connection_for_read()

    def receive(self, job: Job) -> Delivered:
        """Take the message of a job, and return its request."""
        app = self.stage.app
        message = self._connection.default_channel.basic_get(job.queue)
        assert message is not None, f"no message waits in {job.queue}"
        task = app.tasks[job.task]
        made = create_request_cls(symbol_by_name(task.Request), task, self.pool, "solo@here", None)

        request: Delivered = made(
            message, on_ack=lambda *_: None, on_reject=message.reject_log_error, app=app, hostname="solo@here",
            task=task, connection_errors=(), body=message.body, decoded=False, utc=True,
        )  # fmt: skip
        request._request_dict[WORKER] = self.stage.worker_id
        return request


@pytest.fixture
def worker(stage: Stage) -> Iterator[Worker]:
    made = Worker(stage)
    before = _state._tls.current_app
    stage.app.set_current()  # as in the process of a worker: Celery looks for tasks there
    yield made
    _state._set_current_app(before)
    made._connection.close()


def test_a_second_delivery_during_a_body_is_given_back_and_does_not_run_within_it(stage: Stage, worker: Worker) -> None:
    order: list[str] = []
    second = stage.job(lambda job: order.append("second"), queue="solo-second")
    later: list[Delivered] = []

    def first(job: Any) -> None:
        order.append("first begins")
        later.append(worker.receive(second))
        later[0].execute_using_pool(worker.pool)
        order.append("first ends")

    job = stage.job(first, queue="solo-first")

    worker.receive(job).execute_using_pool(worker.pool)

    assert order == ["first begins", "first ends"]
    assert (job.refresh().status, second.refresh().status) == ("completed", "queued")

    worker.receive(second).execute_using_pool(worker.pool)
    assert order[2:] == ["second"], "its message is in the queue again, and may begin once the first is over"


def test_a_body_that_fails_leaves_the_process_free(stage: Stage, worker: Worker) -> None:
    def failing(job: Any) -> None:
        raise ValueError("no")

    ran: list[int] = []
    worker.receive(stage.job(failing, queue="solo-fails")).execute_using_pool(worker.pool)
    worker.receive(stage.job(lambda job: ran.append(1), queue="solo-next")).execute_using_pool(worker.pool)

    assert ran == [1]

"""A worker's consumer connects again after an error of the connection that `Blueprint.start` raises."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from amqp.exceptions import NotFound
from celery import Celery, bootsteps
from celery.platforms import EX_FAILURE, EX_OK
from kombu import Queue

from celery_sidejob.hooks.patches import celery_worker


class Vanishing(bootsteps.StartStopStep):
    """Finds once that a queue was deleted."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    starts = 0

    def start(self, c: Any) -> None:
        Vanishing.starts += 1
        if Vanishing.starts == 1:
            raise NotFound("the queue was deleted")


@pytest.fixture(autouse=True)
def vanishing(app: Celery) -> None:
    """A worker has such a step."""
    Vanishing.starts = 0
    app.steps["consumer"].add(Vanishing)


def test_a_queue_that_was_deleted_meanwhile_ends_no_worker(make_worker: Any) -> None:
    assert list(inspect.signature(bootsteps.Blueprint.start).parameters) == ["self", "parent"]
    worker = make_worker()
    celery_worker.survive_deleted_queues(worker.consumer.blueprint)

    worker.run()

    assert (Vanishing.starts, worker.exitcode) == (2, EX_OK)


def test_without_it_the_worker_ends(make_worker: Any) -> None:
    worker = make_worker()

    worker.run()

    assert (Vanishing.starts, worker.exitcode) == (1, EX_FAILURE)


def test_what_its_user_declares_by_himself_has_to_be_there(app: Celery, make_worker: Any) -> None:
    app.conf.task_queues = [Queue("celery", no_declare=True)]
    worker = make_worker()
    celery_worker.survive_deleted_queues(worker.consumer.blueprint)

    worker.run()

    assert worker.exitcode == EX_FAILURE

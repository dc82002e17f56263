"""What runs is cancelled within `Consumer.on_connection_error_after_connected`, if the project wants that."""

from __future__ import annotations

import inspect
from typing import Any

from amqp.exceptions import RecoverableConnectionError
from celery import Celery, bootsteps
from celery.worker import state
from celery.worker.consumer import Consumer

from celery_sidejob.hooks.patches import celery_worker
from tests.hooks.patches.conftest import task_of


class Breaking(bootsteps.StartStopStep):
    """Finds once that the connection broke."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    broke = False

    def start(self, c: Any) -> None:
        if not Breaking.broke:
            Breaking.broke = True
            raise RecoverableConnectionError("the broker is gone")


class Running:
    """A run that goes on meanwhile, as far as Celery asks."""

    acknowledged = False

    def __init__(self, task: Any, told: list[Any]) -> None:
        self.task = task
        self._told = told

    def cancel(self, pool: Any, *args: Any, **options: Any) -> None:
        self._told.append("cancelled")


def test_what_it_cancels_is_known_to_be_so(app: Celery, make_worker: Any) -> None:
    assert list(inspect.signature(Consumer.on_connection_error_after_connected).parameters) == ["self", "exc"]
    Breaking.broke = False
    app.steps["consumer"].add(Breaking)
    task = task_of(app, "late", acks_late=True)
    worker = make_worker()
    told: list[Any] = []
    celery_worker.note_lost_connections(worker.consumer, told.append)
    running = Running(task, told)
    state.active_requests.add(running)

    worker.run()

    assert told == [True, "cancelled", False]

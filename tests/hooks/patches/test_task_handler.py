"""A worker calls what `Consumer.create_task_handler` returns with each message."""

from __future__ import annotations

import inspect
from typing import Any

from celery import Celery
from celery.worker.consumer import Consumer

from celery_sidejob.hooks.patches import celery_worker
from tests.hooks.patches.conftest import task_of


def test_a_message_that_cannot_be_taken_is_given_up_and_the_next_runs(app: Celery, make_worker: Any) -> None:
    assert list(inspect.signature(Consumer.on_invalid_task).parameters) == ["self", "body", "message", "exc"]
    ran: list[str] = []
    task = task_of(app, "asked", lambda: ran.append("body"))
    worker = make_worker()
    celery_worker.give_up_malformed(worker.consumer)
    with app.connection_for_write() as connection:
        producer = connection.Producer()
        for odd in ([5], {}, 5):
            producer.publish([[], {}, {}], routing_key="celery", headers={"task": odd, "id": "odd"})
    task.delay()

    worker.run()

    assert ran == ["body"]

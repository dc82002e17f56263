"""A worker begins to consume by `Consumer.consume`, and tells a prefetch by `QoS.callback`."""

from __future__ import annotations

import inspect
from typing import Any

from celery import Celery, bootsteps
from kombu import Consumer
from kombu.common import QoS

from celery_sidejob.hooks.patches import connections
from tests.hooks.patches.conftest import task_of

told: list[Any] = []


class Deciding(bootsteps.StartStopStep):
    """Replaces both, where ours does."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        assert isinstance(c.task_consumer, Consumer)
        assert isinstance(c.qos, QoS)
        begin = connections.replace_consume(c.task_consumer, lambda: (told.append("consume"), begin())[0])
        connections.replace_prefetch(c.qos, lambda **options: told.append(options))


def test_both_are_asked_by_the_worker_s_loop(app: Celery, make_worker: Any) -> None:
    assert all(one.default is None for one in list(inspect.signature(Consumer.consume).parameters.values())[1:])
    told.clear()
    app.steps["consumer"].add(Deciding)
    held = task_of(app, "held")
    held.apply_async(countdown=0.05)

    worker = make_worker()
    worker.run(after=0.2)

    assert told[0] == "consume"
    assert {"prefetch_count": worker.consumer.initial_prefetch_count + 1} in told  # what has an eta is held

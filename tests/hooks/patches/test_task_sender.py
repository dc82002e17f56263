"""All calls of tasks end in what `AMQP._create_task_sender` returns, with a message of `as_task_v2`."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, group
from celery.app.amqp import AMQP

from celery_sidejob.hooks.patches import app_methods
from celery_sidejob.hooks.patches.app_methods import DurableAMQP
from tests.hooks.patches.conftest import task_of


class Own(AMQP):
    """A project's own."""


def test_the_messages_of_all_calls_are_given_to_the_sender(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a producer of ours they are kept: here it only notes them."""
    noted: list[tuple[str, Any, bool]] = []

    class Noting:
        def __init__(self, producer: Any, app: Celery, task: str, queue: Any) -> None:
            self.noted = (task, getattr(queue, "name", queue))
            self.connection = producer.connection

        def publish(self, body: Any, **options: Any) -> None:
            noted.append((*self.noted, {"headers", "exchange", "routing_key", "correlation_id"} <= options.keys()))

    monkeypatch.setattr(DurableAMQP, "producer_of_durable", Noting, raising=False)
    app_methods.send_messages_by(app, DurableAMQP)

    kept = task_of(app, "kept", durable=True)

    kept.delay()
    app.send_task("contract.kept", (1,))
    group(kept.s(1), kept.s(2)).apply_async()
    chain(kept.s(1), kept.s()).apply_async()

    assert noted == [("contract.kept", "celery", True)] * 5


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("base", [AMQP, Own])
def test_the_class_of_a_project_stays_in_place(app: Celery, base: type, used_before: bool) -> None:
    app.amqp_cls = base
    before = app.amqp if used_before else None
    sender = app.amqp.send_task_message if used_before else None

    app_methods.send_messages_by(app, DurableAMQP)

    assert isinstance(app.amqp, DurableAMQP)
    assert isinstance(app.amqp, base)
    assert app.amqp is before or not used_before
    assert app.amqp.send_task_message is not sender

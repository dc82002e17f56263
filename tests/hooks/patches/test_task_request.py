"""A worker hands each request to its pool by `Consumer.on_task_request`, also one with an eta or a rate limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.worker.consumer import Consumer
from celery.worker.request import Request

from celery_sidejob.hooks.patches import celery_worker
from tests.hooks.patches.conftest import task_of


@pytest.mark.parametrize(("options", "limit"), [({}, None), ({"countdown": 0.05}, None), ({}, "100/s")])
def test_every_request_passes_it(app: Celery, make_worker: Any, options: dict[str, Any], limit: str | None) -> None:
    assert list(inspect.signature(Consumer.__init__).parameters)[1] == "on_task_request"
    ran: list[str] = []
    asked = task_of(app, "asked", lambda: ran.append("body"), rate_limit=limit)
    worker = make_worker()

    def handle(before: Callable[[Any], Any], request: Request) -> None:
        if request.name == "contract.asked":
            ran.append(type(request).__name__)
        before(request)
        if request.name == "contract.asked":
            app.send_task("contract.stop")

    celery_worker.hand_over_by(worker.consumer, handle)
    asked.apply_async(**options)
    worker.run(after=None)

    assert ran == ["Request", "body"]

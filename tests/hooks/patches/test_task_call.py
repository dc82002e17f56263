"""`Backend.on_task_call` is asked before a message is sent, by the app's own thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import Backend
from celery.backends.redis import RedisBackend
from celery.backends.rpc import RPCBackend

from celery_sidejob.hooks.patches import result_backend


@pytest.mark.parametrize("backend", [Backend, RedisBackend, RPCBackend])
def test_what_it_is_asked_with(backend: type[Backend]) -> None:
    assert list(inspect.signature(backend.on_task_call).parameters) == ["self", "producer", "task_id"]


def test_who_calls_a_task_asks_it_once(app: Celery) -> None:
    asked: list[tuple[Any, str]] = []

    def ask(backend: Any, before: Callable[..., Any], producer: Any, task_id: str) -> Any:
        asked.append((backend, task_id))
        return before(producer, task_id)

    result_backend.ask_by(app.backend, ask)
    result_backend.ask_by(app.backend, ask)

    result = app.send_task("contract.elsewhere")
    app.send_task("contract.elsewhere", ignore_result=True)

    assert asked == [(app.backend, result.id)]

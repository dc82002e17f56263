"""Every call of a task ends in `Celery.send_task`, which asks the backend and takes a producer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from celery import Celery, chain, group

from celery_sidejob.hooks.patches import app_methods
from celery_sidejob.hooks.tasks.calls import PRODUCER_INDEX
from tests.hooks.patches.conftest import task_of
from tests.tools.producers import all_producers


def test_where_a_producer_is_given() -> None:
    assert list(inspect.signature(Celery.send_task).parameters)[2 + PRODUCER_INDEX] == "producer"


def test_all_ways_to_call_pass_it(app: Celery) -> None:
    sent: list[tuple[Celery, str, bool]] = []

    def send(app: Celery, before: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
        sent.append((app, name, options.get("producer") is None or len(args) <= PRODUCER_INDEX))
        return before(name, *args, **options)

    app_methods.send_by(app, send)
    plain = task_of(app, "plain")

    app.send_task("contract.elsewhere")
    plain.delay()
    group(plain.s(), plain.s()).apply_async()
    chain(plain.s(), plain.s()).apply_async()

    assert sent == [(app, name, True) for name in ["contract.elsewhere", *["contract.plain"] * 4]]


def test_the_producer_that_is_given_is_all_that_is_taken(app: Celery) -> None:
    taken = app.connection_for_write().Producer()
    with all_producers(app):
        app.send_task("contract.elsewhere", producer=taken)

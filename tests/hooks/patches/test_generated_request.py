"""Celery makes a subclass of a task's Request, with two methods of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from celery import Celery
from celery.worker.request import Request, create_request_cls

from celery_sidejob.hooks.patches.celery_worker import wrap_generated
from tests.hooks.patches.conftest import task_of


def note(name: str) -> Callable[..., Any]:
    def noting(self: Any, before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        Own.told.append(f"{name} begins")
        try:
            return before(self, *args, **options)
        finally:
            Own.told.append(f"{name} ends")

    return noting


class Own(Request):
    """A project's own, whose generated subclasses are wrapped."""

    told: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrap_generated(cls, execute_using_pool=note("begin"), on_success=note("end"))


def test_a_run_passes_what_is_put_around_them(app: Celery, make_worker: Any) -> None:
    Own.told.clear()
    task_of(app, "own", lambda: Own.told.append("body"), Request=Own).delay()

    make_worker().run()

    assert Own.told == ["begin begins", "body", "end begins", "end ends", "begin ends"]


def test_the_subclass_has_them_itself(app: Celery, make_worker: Any) -> None:
    task = task_of(app, "own")
    made = create_request_cls(Request, task, make_worker().pool, "contract@here", None)

    assert {"execute_using_pool", "on_success"} <= vars(made).keys()
    assert list(inspect.signature(made.execute_using_pool).parameters) == ["self", "pool", "kwargs"]
    assert list(inspect.signature(made.on_success).parameters) == ["self", "failed__retval__runtime", "kwargs"]

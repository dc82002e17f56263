"""Objects that Celery has made take another class and stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.app.amqp import AMQP
from celery.app.control import Control

from celery_sidejob.hooks.patches import above, become
from tests.hooks.patches.conftest import task_of


class Marker:
    """Put before their class."""

    def marked(self) -> str:
        return "marked"


@pytest.mark.parametrize("name", ["amqp", "control", "task"])
def test_an_object_of_celery_s_takes_another_class(app: Celery, name: str) -> None:
    task = task_of(app, "task", lambda: "ran", max_retries=7)
    app.finalize()
    thing: Any = app.tasks["contract.task"] if name == "task" else getattr(app, name)
    before, state = type(thing), dict(vars(thing))

    become(thing, Marker, before, own=1)

    assert (thing.marked(), thing.own, type(thing).__name__) == ("marked", 1, before.__name__)
    assert isinstance(thing, before)
    assert vars(thing) == state
    if name == "task":
        assert (task.marked(), task(), task.max_retries, task.app) == ("marked", "ran", 7, app)
        assert app.tasks["contract.task"] is thing


@pytest.mark.parametrize("celerys", [AMQP, Control])
def test_a_project_s_own_class_stays_below(celerys: type) -> None:
    ours = type("Ours", (celerys,), {})
    own = type("Own", (celerys,), {})

    assert above(ours, celerys) is ours
    made = above(ours, own)
    assert made.__mro__[1:4] == (ours, own, celerys)
    assert above(ours, made) is made

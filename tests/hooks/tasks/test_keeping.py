"""A message of ours is what Celery would send."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.app.amqp import AMQP

from tests.tools.apps import make_app


@pytest.fixture(scope="module")
def app() -> Celery:
    made = make_app("shop", broker=None)
    return made


@pytest.mark.parametrize("options", [{}, {"argsrepr": "(secret)"}, {"kwargsrepr": ""}], ids=str)
@pytest.mark.parametrize("kwargs", [None, {}, {"to": "x"}], ids=str)
@pytest.mark.parametrize("args", [None, (), [], (1,), ("it's",)], ids=str)
def test_arguments_are_shown_as_celery_shows_them(app: Celery, args: Any, kwargs: Any, options: dict[str, str]) -> None:
    for _ in range(2):
        ours = app.amqp.as_task_v2("one", "shop.mail", args, kwargs, **options)
        assert type(app.amqp) is not AMQP
        assert ours == AMQP(app).as_task_v2("one", "shop.mail", args, kwargs, **options)


def test_what_was_given_by_its_place_stays(app: Celery) -> None:
    given: Any = [None] * 19 + ["here", False, "(a)", "{b}"]

    headers = app.amqp.as_task_v2("one", "shop.mail", (), {}, *given).headers

    assert (headers["argsrepr"], headers["kwargsrepr"]) == ("(a)", "{b}")

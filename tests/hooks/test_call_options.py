"""What a call of a durable task is given is looked at before anything is kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from celery_sidejob import InvalidValueError
from celery_sidejob.model.checks import is_in_calendar
from tests.hooks.tasks.test_durable import app, published

__all__ = ["app"]

WRONG = {
    "a letter is missing": (
        {"countdwn": 5},
        "'countdwn' is no option of a call of shop.pay. Did you mean 'countdown'?",
    ),
    "a letter too many": ({"expiress": 5}, "Did you mean 'expires'?"),
    "letters that changed places": ({"rotuing_key": "x"}, "Did you mean 'routing_key'?"),
    "a countdown with its unit": (
        {"countdown": "5s"},
        "a number of seconds, at most 10000000000, not '5s'",
    ),
    "a countdown that is a timedelta": ({"countdown": timedelta(seconds=5)}, "countdown is a number of seconds"),
    "a word for a time": ({"eta": "tomorrow"}, "eta is a datetime, or a text in ISO 8601, not 'tomorrow'"),
    "seconds for a time": ({"eta": 5}, "eta is a datetime"),
    "a word for seconds": ({"expires": "soon"}, "expires is a datetime, or a text in ISO 8601, or a number of seconds"),
    "an expiry that is a timedelta": ({"expires": timedelta(1)}, "expires is a datetime"),
    "a word for a priority": ({"priority": "high"}, "priority is a whole number from 0 to 255, not 'high'"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "times": {"eta": datetime.now(UTC), "expires": datetime.now(UTC) + timedelta(hours=1)},
    "times as text": {"eta": "2026-01-01T00:00:00+00:00", "expires": "2100-01-01T00:00:00Z"},
    "seconds": {"countdown": 0.5, "expires": 3600, "priority": 3},
    "none at all": {"countdown": None, "eta": None, "expires": None, "priority": None},
    "the project's own stamp": {"stamped_headers": ["countdwn"], "countdwn": "mine"},
    "what is like no option": {"tenant": "one"},
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_call_is_said_and_nothing_is_kept(app: Celery, case: str) -> None:
    options, said = WRONG[case]

    with pytest.raises(InvalidValueError) as raised:
        app.send_task("shop.pay", (1,), **options)

    assert said in str(raised.value)
    assert published(app) == []
    app.sidejob.poll()
    assert published(app) == [], "nor is it kept"


@pytest.mark.parametrize("case", RIGHT)
def test_what_celery_understands_is_taken(app: Celery, case: str) -> None:
    assert app.send_task("shop.pay", (1,), **RIGHT[case]).id


def test_send_many_says_which_of_its_signatures_is_wrong(app: Celery) -> None:
    good = app.signature("shop.pay", args=(1,))

    with pytest.raises(InvalidValueError, match=r"signatures\[1\] of send_many\(\): eta is a datetime"):
        app.sidejob.send_many([good, good.clone().set(eta="tomorrow")])

    assert published(app) == []


def test_a_time_is_one_that_every_time_zone_and_the_store_have() -> None:
    first, last = datetime(1, 1, 3), datetime(9999, 12, 29)
    assert all(map(is_in_calendar, (first, last)))
    assert not any(map(is_in_calendar, (first - timedelta(seconds=1), last + timedelta(seconds=1))))

"""Values are alike if they are written alike."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from celery_sidejob.model.values import alike

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": [1, ("b", None)]}, {"a": [1, ("b", None)]}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ([1], (1,), False),
        ([1], [1, 2], False),
        (0.0, -0.0, False),
        (NOON, NOON.astimezone(timezone(timedelta(hours=1))), False),
        (NOON, datetime(2026, 1, 1, 12, tzinfo=UTC), True),
        (2.5, 5 / 2, True),
        (object(), object(), False),
        (1, 1.0, False),
        ("a", "b", False),
    ],
)
def test_equal_is_not_enough(one: Any, other: Any, expected: bool) -> None:
    assert alike(one, other) is expected

"""A rate is read as Celery reads its `rate_limit`, and becomes a bucket."""

from __future__ import annotations

from typing import Any

import pytest

from celery_sidejob.model.queue import Rate, parse_rate


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ("600/m", Rate(0.1, 600)), ("10/s", Rate(0.1, 10)), ("2/h", Rate(1800, 2)), ("7", Rate(1 / 7, 7)),
        ("0.5/s", Rate(2, 1)), (".5/m", Rate(120, 1)), ("2.5/s", Rate(0.4, 2)), (" 8 / m ", Rate(7.5, 8)),
        (4, Rate(0.25, 4)), (0.5, Rate(2, 1)), (1e-7, Rate(1e7, 1)), (1_000_000, Rate(1e-6, 1_000_000)),
    ],
)  # fmt: skip
def test_a_rate_is_a_bucket(given: Any, rate: Rate) -> None:
    found = parse_rate(given)
    assert found is not None
    assert (found.burst, found.interval_s) == (rate.burst, pytest.approx(rate.interval_s))


@pytest.mark.parametrize(
    "given",
    [
        "", "/m", "0/s", "-1/s", "5/d", "600/min", "1e3/s", "1000001/s", "many", "\u0661/s", 0, -1, True, 1e-11,
        float("nan"), float("inf"), None, b"1/s", ["1/s"],
    ],
)  # fmt: skip
def test_what_is_no_rate(given: Any) -> None:
    assert parse_rate(given) is None

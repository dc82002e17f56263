"""The interval in which a median lies, as tables of the sign test have it."""

from __future__ import annotations

import pytest

from benchmarks.turns import Median


@pytest.mark.parametrize(("rounds", "lower", "upper"), [(1, 1, 1), (5, 1, 5), (9, 2, 8), (30, 10, 21), (100, 40, 61)])
def test_the_interval_leaves_out_as_many_as_it_may(rounds: int, lower: int, upper: int) -> None:
    found = Median.of(range(1, rounds + 1))

    assert (found.lower, found.upper) == (lower, upper)

"""Which rows of a test CI takes."""

from __future__ import annotations

import pytest

from tests.tools.few import chosen


@pytest.mark.parametrize(
    ("rows", "count", "taken"),
    [(3, 1, {2}), (4, 2, {1, 3}), (12, 4, {2, 5, 8, 11}), (5, 3, {1, 3, 4}), (2, 3, {0, 1}), (1, 1, {0})],
)
def test_the_last_row_and_others_at_even_distances_are_taken(rows: int, count: int, taken: set[int]) -> None:
    assert chosen(rows, count) == taken

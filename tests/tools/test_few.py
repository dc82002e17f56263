"""Which rows of a test are run with `--few`."""

from __future__ import annotations

import pytest

from tests.tools.few import chosen


@pytest.mark.parametrize(("rows", "count"), [(3, 1), (4, 2), (12, 4), (5, 3), (2, 3), (1, 1), (3, 0)])
def test_so_many_rows_are_taken_at_even_distances(rows: int, count: int) -> None:
    for name in map(str, range(50)):
        taken = sorted(chosen(name, rows, count))
        assert len(taken) == min(count, rows)
        gaps = [
            after - before
            for before, after in zip(taken, [*taken[1:], *(row + rows for row in taken[:1])], strict=True)
        ]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_each_row_is_taken_for_some_test() -> None:
    assert set().union(*(chosen(str(number), 5, 1) for number in range(50))) == set(range(5))

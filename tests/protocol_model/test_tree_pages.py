"""In no order do pages overlook a job of a large tree, or terminate one that a forced run of its root has made."""

from __future__ import annotations

import pytest

from tests.protocol_model import tree_pages
from tests.protocol_model.walk import walk


def test_pages_come_to_all_that_is_below_the_root_and_to_nothing_else() -> None:
    states, found = walk(tree_pages)
    assert states > 1000
    assert found == {}


@pytest.mark.parametrize("mistake", tree_pages.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(tree_pages, mistake, only_first=True)[1]

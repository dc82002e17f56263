"""The rules for holding what was fetched stand in every interleaving, and each simplification breaks one in some."""

from __future__ import annotations

import pytest

from tests.protocol_model import holds
from tests.protocol_model.walk import walk


@pytest.mark.parametrize("on_lost", ["requeue", "dead"])
def test_one_hold_counts(on_lost: str) -> None:
    states, found = walk(holds, on_lost=on_lost)
    assert states > 2000
    assert found == {}


@pytest.mark.parametrize("mistake", holds.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(holds, mistake, only_first=True)[1]


@pytest.mark.parametrize("mistake", holds.MISTAKES_OF_DEAD)
def test_a_mistake_with_what_must_not_be_repeated_ends_in_a_trace(mistake: str) -> None:
    assert walk(holds, mistake, on_lost="dead", only_first=True)[1]

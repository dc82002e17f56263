"""The rules for two copies hold in every interleaving, and each tempting simplification breaks them in some."""

from __future__ import annotations

import pytest

from tests.protocol_model import copies
from tests.protocol_model.walk import walk


@pytest.mark.parametrize("on_lost", ["requeue", "dead"])
def test_one_copy_counts(on_lost: str) -> None:
    states, found = walk(copies, on_lost=on_lost)
    assert states > 500
    assert found == {}


@pytest.mark.parametrize("mistake", copies.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(copies, mistake, only_first=True)[1]

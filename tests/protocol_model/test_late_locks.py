"""The rules for locks that are written late hold in every interleaving, and each simplification breaks one in some."""

from __future__ import annotations

import pytest

from tests.protocol_model import late_locks
from tests.protocol_model.walk import walk


def test_one_run_counts() -> None:
    states, found = walk(late_locks)
    assert states > 5000
    assert found == {}


@pytest.mark.parametrize("mistake", late_locks.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(late_locks, mistake, only_first=True)[1]

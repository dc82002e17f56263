"""In a managed queue doorbells are permits: none is missed and no gate is overrun; each mistake ends in its trace."""

from __future__ import annotations

import pytest

from tests.protocol_model import permits
from tests.protocol_model.walk import ENDLESS, walk


def test_the_best_runs_within_the_gate_and_nothing_waits_that_may_run() -> None:
    states, found = walk(permits)
    assert states > 100_000
    assert found == {}


@pytest.mark.few(8)
@pytest.mark.parametrize("mistake", permits.MISTAKES)
def test_a_mistake_ends_in_a_trace(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    if permits.MISTAKES[mistake] == ENDLESS:  # found when all was walked: in one scene, which is enough
        monkeypatch.setattr(permits, "SCENES", permits.SCENES[:1])
    _, found = walk(permits, mistake, only_first=True)
    assert list(found) == [permits.MISTAKES[mistake]]

"""A revoked task does not begin again and is told of once, a success counts once; each mistake breaks one of these."""

from __future__ import annotations

import pytest

from tests.protocol_model import revocations
from tests.protocol_model.walk import walk


@pytest.mark.parametrize("on_lost", ["requeue", "dead"])
def test_what_was_promised_is_kept(on_lost: str) -> None:
    states, found = walk(revocations, on_lost=on_lost)
    assert states > 5000
    assert found == {}


@pytest.mark.parametrize("mistake", revocations.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(revocations, mistake, only_first=True)[1]

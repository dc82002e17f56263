"""The rules for durable steps stand in every interleaving; each simpler one breaks."""

from __future__ import annotations

import pytest

from tests.protocol_model import steps
from tests.protocol_model.walk import walk


def test_what_a_body_does_is_done_once_in_steps_and_outside_of_them() -> None:
    states, found = walk(steps)
    assert states > 10_000
    assert found == {}


@pytest.mark.few(8)
@pytest.mark.parametrize("mistake", steps.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(steps, mistake, only_first=True)[1]

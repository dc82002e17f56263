"""A run that waits for room on a port begins again when there is room; each mistake lets one wait for ever."""

from __future__ import annotations

import pytest

from tests.protocol_model import room
from tests.protocol_model.walk import walk


def test_nobody_waits_for_room_that_is_there() -> None:
    states, found = walk(room)
    assert states > 100
    assert found == {}


@pytest.mark.few(8)
@pytest.mark.parametrize("mistake", room.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(room, mistake, only_first=True)[1]

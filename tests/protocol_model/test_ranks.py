"""Whatever waits in a queue that becomes managed gets its rank, whoever dies; each mistake ends in its trace."""

from __future__ import annotations

import pytest

from tests.protocol_model import ranks
from tests.protocol_model.walk import walk


def test_what_waits_in_a_queue_that_becomes_managed_gets_its_rank() -> None:
    states, found = walk(ranks)
    assert states > 100
    assert found == {}


@pytest.mark.parametrize("mistake", ranks.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(ranks, mistake, only_first=True)[1]

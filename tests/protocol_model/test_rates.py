"""A rate delays runs or ends their job, and loses no ask; each mistake ends in a trace."""

from __future__ import annotations

import pytest

from tests.protocol_model import rates
from tests.protocol_model.walk import walk


def test_no_run_begins_beyond_its_rate_and_none_waits_or_is_refused_within_it() -> None:
    states, found = walk(rates)
    assert states > 1000
    assert found == {}


@pytest.mark.parametrize("mistake", rates.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(rates, mistake, only_first=True)[1]

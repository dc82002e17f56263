"""Each message arrives once, in order, and is read, whoever dies in between; each mistake breaks one of these."""

from __future__ import annotations

import pytest

from tests.protocol_model import publications
from tests.protocol_model.walk import walk


def test_what_was_promised_is_kept() -> None:
    states, found = walk(publications)
    assert states > 4000
    assert found == {}


@pytest.mark.parametrize("mistake", publications.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(publications, mistake, only_first=True)[1]

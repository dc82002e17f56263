"""The rules for runs that are claimed and ended in pages stand in every interleaving; each simpler one breaks."""

from __future__ import annotations

import pytest

from tests.protocol_model import held_jobs
from tests.protocol_model.walk import walk


def test_every_ask_has_its_run_and_none_is_undone_once_begun() -> None:
    states, found = walk(held_jobs)
    assert states > 100_000
    assert found == {}


@pytest.mark.parametrize("mistake", held_jobs.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(held_jobs, mistake, only_first=True)[1]

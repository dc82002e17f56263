"""No order of depending, ending and looking leaves a job that waits for ever; each mistake ends in a trace."""

from __future__ import annotations

import pytest

from tests.protocol_model import dependencies
from tests.protocol_model.walk import walk


def test_a_job_begins_after_all_that_it_depends_on_and_never_waits_for_ever() -> None:
    states, found = walk(dependencies)
    assert states > 10_000
    assert found == {}


@pytest.mark.parametrize("mistake", dependencies.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(dependencies, mistake, only_first=True)[1]

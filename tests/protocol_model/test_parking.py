"""No order of parking, announcing and terminating leaves a job that waits for ever; each mistake ends in a trace."""

from __future__ import annotations

import pytest

from tests.protocol_model import parking
from tests.protocol_model.walk import walk


def test_a_job_is_parked_only_while_no_worker_knows_its_task_and_always_ends() -> None:
    states, found = walk(parking)
    assert states > 1000
    assert found == {}


@pytest.mark.parametrize("mistake", parking.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(parking, mistake, only_first=True)[1]

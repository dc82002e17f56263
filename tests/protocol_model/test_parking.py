"""A job is not parked for ever that somebody serves; each mistake leaves one parked."""

from __future__ import annotations

import pytest

from tests.protocol_model import parking
from tests.protocol_model.walk import walk


def test_no_job_stays_parked_whose_task_a_live_worker_knows() -> None:
    states, found = walk(parking)
    assert states > 50
    assert found == {}


@pytest.mark.parametrize("mistake", parking.MISTAKES)
def test_a_mistake_ends_in_a_trace(mistake: str) -> None:
    assert walk(parking, mistake)[1]

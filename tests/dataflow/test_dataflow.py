"""A short walk of the machine; `python -m benchmarks dataflow` takes a long one.

`python -m benchmarks dataflow --seed 1` has found each of three old faults in its first ten walks, when its mend was
taken back:

- what was read for a block that was not committed is gone with the next commit: `self._undone = None` in
  `OpenUnit.settle`, in place of `lent.rolled_back(self.unit)`;
- what one client sets on a port another undoes: in `Mailboxes.apply`, `SetChannels` writes back the port as it was
  read before the lock (`ports.put` with its default), in place of `ports.set_channels`;
- a turn of defaults comes twice after the body's own commit: `_Turns._only_defaults` adds `RememberInputs` after its
  `yield`, in place of before.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.dataflow.machine import Dataflow
from tests.dataflow.real import Real
from tests.tools.in_process import EMPTY, Stage


@pytest.fixture
def real(stage_database_url: str) -> Iterator[Real]:
    stage = Stage(stage_database_url, sidejob_max_losses=100_000)
    try:
        with Real(stage).armed() as armed:
            yield armed
    finally:
        stage.sql(EMPTY)
        stage.close()


def test_the_store_does_what_the_model_does(real: Real) -> None:
    Dataflow.real = real
    run_state_machine_as_test(
        Dataflow,
        settings=settings(
            max_examples=8,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )

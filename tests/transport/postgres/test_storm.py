"""All that can happen to a worker, once each; `./run proof deaths` has a thousand kills."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from celery_sidejob import embedded
from celery_sidejob.store.schema.migrate import upgrade
from proofs.deaths.accidents import Accident
from proofs.deaths.judge import Begin, Happened, Outcome, doubled
from proofs.deaths.storm import Storm
from tests.tools.workers import Processes


@pytest.mark.few(0)
@pytest.mark.parametrize("pool", [pytest.param("solo", marks=pytest.mark.slow), "prefork"])
def test_nothing_is_lost_or_left_whatever_happens_to_workers(
    processes: Processes, own_postgres: embedded.Postgres, tmp_path: Path, pool: str
) -> None:
    upgrade(own_postgres.url)
    processes.pool = pool
    with Storm(processes, own_postgres, tmp_path, seed=1) as storm:
        outcome = storm.run(list(Accident))
    assert not outcome.wrong, str(outcome)
    assert outcome.sent > 1000


def test_a_run_is_explained_by_the_accident_of_its_worker() -> None:
    happened = [
        Happened(Accident.RESTART, 10.0, frozenset([1, 2])),
        Happened(Accident.KILLED, 12.0, frozenset([1])),
    ]
    begins = {
        1: [Begin(1, 11.99), Begin(2, 12.5)],  # just before the kill
        2: [Begin(1, 10.5), Begin(2, 12.5)],  # while Postgres was away
        3: [Begin(1, 5.0), Begin(2, 12.5)],
        4: [Begin(2, 20.0), Begin(3, 21.0)],
        5: [Begin(3, 20.0)],
    }
    found = {accident: [round(one, 2) for one in before_s] for accident, before_s in doubled(begins, happened).items()}
    assert found == {Accident.KILLED: [0.01], Accident.RESTART: [-0.5, 5.0], None: [0.0]}
    outcome = Outcome(
        happened=Counter(one.accident for one in happened), sent=5, unknown=0, lost=[], lost_early=[], doubled=found,
        recovered_s=0.0, left=[], in_order=True,
    )  # fmt: skip
    assert outcome.wrong == ["1 ran twice though nothing had happened to their worker"]

"""Real workers that are killed in the middle of fetching; `./run proof kills` does this a thousand times."""

from __future__ import annotations

from pathlib import Path

from proofs.kills import Death, Storm
from tests.tools.workers import Processes


def test_nothing_is_lost_or_left_when_workers_are_killed(processes: Processes, redis_url: str, tmp_path: Path) -> None:
    # This seed kills one while it fetches, one that stands still while it waits, and one while it starts.
    outcome = Storm(processes, redis_url, tmp_path, transport="sidejob", seed=27).run(3)
    assert sorted(outcome.deaths) == sorted([Death.FETCHING, Death.IDLE, Death.STARTING])
    assert outcome.kept, str(outcome)
    assert outcome.doubled < outcome.published, str(outcome)

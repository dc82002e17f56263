"""The durable tasks that run in this process."""

from __future__ import annotations

from typing import Any

from ...operations.ledger.durable_runs import Run

RUNS: dict[str, Run] = {}
"""The runs by task id."""


def run_of(task: Any) -> Run | None:
    """Return the run of the task's present request, if it has begun one; a header may have the same name."""
    found = getattr(getattr(task, "request", None), "sidejob_run", None)
    return found if isinstance(found, Run) else None

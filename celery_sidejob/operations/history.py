"""Entries in the histories of jobs, as a transaction makes them; a run's own row is written by the run's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

from ..model.changes import Log
from ..store import history
from ..store.statement import Transaction


def write(executor: Transaction, found: Sequence[Log], *, keep: int) -> None:
    """Write the entries that jobs make in their histories, the last `keep` of each job."""
    if not found or not keep:
        return
    kept: dict[int, deque[Log]] = {}
    for change in found:
        kept.setdefault(change.job_id, deque(maxlen=keep)).append(change)
    now = monotonic()
    history.log(
        executor,
        [
            {
                "job_id": one.job_id, "what": one.message, "age_s": now - one.made_at, "run_no": one.run_no,
                "worker_id": one.worker_id, "detail": one.detail,
            }
            for entries in kept.values() for one in entries
        ],
        keep=keep,
    )  # fmt: skip

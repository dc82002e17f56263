"""Finds workers that died; `lost_runs.py` takes the runs that they held."""

from __future__ import annotations

import time

from ...store import workers
from ..duty import Count, Report
from .sweep import SweepDuty

TROUBLE_S = 10.0
"""Seconds after an outage of the store in which a free lock means nothing: its owner may still be reconnecting."""


class DeadWorkers(SweepDuty):
    """Suspects, and declares dead: two steps, because only two observations make it irrevocable."""

    is_urgent = True
    counts = (
        Count(
            "declared_dead", "Workers declared dead for their silence or their free liveness lock.",
            total="workers_declared_dead",
        ),
        Count(
            "suspected", "Workers suspected of being dead: poll again in a while, one that stays silent is declared "
            "dead.", is_work=False,
        ),
    )  # fmt: skip

    def _do(self, report: Report) -> None:
        settings, worker = self._runtime.settings, self._sweep.worker
        silence_s = settings.lease / 2
        trouble_at = max(self._sweep.trouble_at, worker.lock_lost_at if worker else self._sweep.trouble_at)
        trouble = time.monotonic() - trouble_at < TROUBLE_S
        self._sweep.suspects = self._sweep.has_dead = False
        for row in workers.liveness(self._connections, schema=settings.schema, silence_s=silence_s):
            dead, suspected = row.dead_at is not None, row.suspect_at is not None
            if not dead and not suspected:
                by = "lock" if row.lock_free and not (row.restarted or trouble) else "silence" if row.silent else None
                if by is not None:
                    suspected = workers.suspect(self._connections, row.id, by=by, seen=row.beat_at)
                    self._sweep.suspects |= suspected
            elif not dead and not trouble:  # during trouble its beat may be delayed too
                self._sweep.suspects |= row.suspect_by == "lock"
                dead = workers.declare_dead(
                    self._connections, row.id, lock_grace_s=settings.lock_grace, silence_s=silence_s
                )
                report["declared_dead"] += dead
            report["suspected"] += suspected and not dead
            self._sweep.has_dead |= dead

"""Ends parked jobs that were terminated: no worker knows their task, so no worker can run their shutdown."""

from __future__ import annotations

import logging

from ...operations.shutdown import end_parked
from ...store import parked
from ..duty import Count, Report
from .sweep import PAGE, SweepDuty

logger = logging.getLogger("celery_sidejob")


class ParkedTerminations(SweepDuty):
    """Terminates a page of them without their shutdown, each after `parked.SHUTDOWN_WAITS_S`."""

    interval_s = 10.0
    counts = (
        Count(
            "shutdowns_skipped", "Parked jobs that were terminated without their shutdown.", total="shutdowns_skipped"
        ),
    )

    def _do(self, report: Report) -> None:
        for job_id in parked.to_end(self._connections, limit=PAGE):
            with self._sweep.aside.by_itself("parked job", job_id) as may:
                if may and end_parked(self._runtime, job_id):
                    logger.warning(
                        "Job %d was terminated without its shutdown: no worker of its queue knows its task", job_id
                    )
                    report["shutdowns_skipped"] += 1

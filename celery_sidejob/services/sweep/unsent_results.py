"""Stores results in the backend, if the process that ended the asking could not."""

from __future__ import annotations

import json
import logging
from typing import Any

from ...model.messages import Outcome
from ...model.row_errors import log_row_error
from ...operations.after_commit import settle
from ...store import askings
from ..duty import Count, Report
from .sweep import PAGE, Sweep, SweepDuty

logger = logging.getLogger("celery_sidejob")

RESULT_GRACE_S = 5.0
"""Seconds that the process ending an asking has to store its result itself."""


class UnsentResults(SweepDuty):
    """Stores a page of results; those of the backend's thread may come too late for the report."""

    interval_s = RESULT_GRACE_S / 2
    counts = (Count("results", "Results brought to the result backend."),)

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._since: Any = None

    def _do(self, report: Report) -> None:
        backend = self._sweep.backend
        if backend.is_busy:
            return
        rows = askings.unsent(self._connections, older_than_s=RESULT_GRACE_S, limit=PAGE, since=self._since)
        # The next page comes next time: a result that the backend never takes must not hold up the others.
        last = rows[-1].closed_at if len(rows) == PAGE else None
        self._since = last if last != self._since else None
        if rows:
            backend.do(lambda: self._settle(rows, report))

    def _settle(self, rows: Any, report: Report) -> None:
        outcomes = []
        for row in rows:
            try:
                outcomes.append(_outcome(row))
            except ValueError:
                log_row_error(
                    logger, row.task_id, "The end of %s cannot be read, and is not brought to the backend", row.task_id
                )
        report["results"] += settle(self._runtime, outcomes)


def _outcome(row: Any) -> Outcome:
    return Outcome(
        row.task_id, row.job_id, row.task, row.queue, row.outcome, row.result,
        json.loads(row.options) if row.options else None, row.args, row.kwargs,
    )  # fmt: skip

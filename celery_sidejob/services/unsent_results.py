"""Brings results to the backend that the process which ended the asking could not."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from ..model.messages import Outcome
from ..model.troubles import log_trouble
from ..operations.runtime import Runtime
from ..store import askings
from ..store.turns import take_turns
from .loop import Turn

logger = logging.getLogger("celery_sidejob")

PAGE = 200
RESULT_GRACE_S = 5.0
"""How long the process that ended an asking has to store its result itself."""


class UnsentResults:
    """A part of the sweeper's turn; with `apart` a thread of its own does what speaks to the backend.

    A backend that is silent holds up whoever speaks to it, for minutes.
    """

    def __init__(self, runtime: Runtime, *, apart: bool) -> None:
        self._runtime = runtime
        self._apart = apart
        self._since: Any = None
        self._settling: threading.Thread | None = None
        self._turn = Turn()

    def run_once(self) -> int:
        """Store a page of them, and return how many are known to be stored."""
        if self._settling is not None and self._settling.is_alive():
            return 0
        rows = askings.unsent(self._runtime.connections, older_than_s=RESULT_GRACE_S, limit=PAGE, since=self._since)
        # The next page next time: what a backend never takes keeps nobody else's result back.
        last = rows[-1].closed_at if len(rows) == PAGE else None
        self._since = last if last != self._since else None
        if not self._apart:
            return self._settle_all(rows)
        if rows:
            self.apart(lambda: self._settle_all(rows))
        return 0

    def apart(self, work: Callable[[], Any]) -> bool:
        """Have one thing at a time done that speaks to the backend; False if the last is not done yet."""
        if not self._apart:
            work()
            return True
        if self._settling is not None and self._settling.is_alive():
            return False
        self._settling = threading.Thread(target=self._run, args=(work,), name="sidejob-results", daemon=True)
        self._settling.start()
        return True

    def _run(self, work: Callable[[], Any]) -> None:
        take_turns()
        try:
            with self._turn:
                work()
        except Exception:
            logger.exception("Results could not be brought to the backend; it is tried again")

    def _settle_all(self, rows: Any) -> int:
        outcomes = []
        for row in rows:
            try:
                outcomes.append(_outcome(row))
            except ValueError:
                log_trouble(
                    logger, row.task_id, "The end of %s cannot be read, and is not brought to the backend", row.task_id
                )
        return self._runtime.settle(outcomes)


def _outcome(row: Any) -> Outcome:
    return Outcome(
        row.task_id, row.job_id, row.task, row.queue, row.outcome, row.result,
        json.loads(row.options) if row.options else None, row.args, row.kwargs,
    )  # fmt: skip

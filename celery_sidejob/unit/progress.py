"""Telling how far a run is: at once, but at most once a second; the last word with its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..model.errors import StoreUnavailableError
from ..model.logger import logger
from ..operations.hold import Hold
from ..operations.runtime import Runtime
from ..store import state
from ..store.statement import Transaction

EVERY_S = 1.0


@dataclass(slots=True)
class Told:
    """What a run says of how far it is. It is no part of a unit: what is discarded was done all the same."""

    runtime: Runtime
    hold: Hold
    show: Callable[[str], object] | None = None
    """Shows it, as JSON text, to callers that wait for the result."""
    _pending: tuple[float | None, float | None, str | None] | None = None
    _written_at: float = float("-inf")

    def tell(self, done: float | None, total: float | None, note: str | None) -> None:
        """Keep this, now or with the next that is kept."""
        self._pending = done, total, note
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    def write(self) -> None:
        """Keep what was said last; never raises for the store, because the work goes on without it."""
        if self._pending is None:
            return
        (done, total, note), self._pending = self._pending, None
        self._written_at = time.monotonic()

        def work(executor: Transaction) -> None:
            state.set_progress(
                executor,
                self.hold.job_id,
                run_no=self.hold.run_no,
                worker_id=self.hold.worker_id,
                done=done,
                total=total,
                note=note,
            )

        try:
            self.runtime.connections.transact("progress", work, single=True)
        except StoreUnavailableError as error:
            logger.debug("The progress of job %d is not kept: %s", self.hold.job_id, error)
            return
        if self.show is not None:
            self.show(json.dumps({"current": done, "total": total, "note": note}))

"""Telling how far a run is: at once, but at most once a second; the last word with its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..model.errors import StoreUnavailableError
from ..model.logger import logger
from ..operations.hold import Hold
from ..operations.runtime import Runtime
from ..store import jobs

EVERY_S = 1.0


@dataclass(slots=True)
class Told:
    """What a run says of how far it is. It is no part of a unit: what is discarded was done all the same."""

    runtime: Runtime
    hold: Hold
    show: Callable[[str], object] | None = None
    """Shows it, as JSON text, to callers that wait for the result."""
    _pending: Mapping[str, Any] | None = None
    _written_at: float = float("-inf")

    def tell(self, done: float | None, total: float | None, note: str | None) -> None:
        """Keep this, now or with the next that is kept."""
        self._pending = {"done": done, "total": total, "note": note}
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    def write(self) -> None:
        """Keep what was said last; never raises for the store, because the work goes on without it."""
        told, self._pending, hold = self._pending, None, self.hold
        if told is None:
            return
        self._written_at = time.monotonic()
        work = partial(jobs.set_progress, job_id=hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, **told)
        try:
            self.runtime.connections.transact("progress", work, single=True)
        except StoreUnavailableError as error:
            logger.debug("The progress of job %d is not kept: %s", hold.job_id, error)
            return
        if self.show is not None:
            self.show(json.dumps({"current": told["done"], "total": told["total"], "note": told["note"]}))

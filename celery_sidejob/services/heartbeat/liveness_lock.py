"""A worker's liveness lock: a session's advisory lock, which falls with the process that holds its connection.

Others learn by it within seconds that a worker is dead. It means something only on a session that is the worker's
alone, in the store's own database: behind a proxy that hands out sessions it would be left with a session that is
anybody's, and say that a dead worker lives. So there it is not taken, and silence alone tells.
"""

from __future__ import annotations

import logging
import time

from ...model.errors import StoreUnavailableError
from ...model.settings import Settings
from ...store import workers
from ...store.connection.opening import Opener
from ...store.connection.own_executor import OwnExecutor

logger = logging.getLogger("celery_sidejob")

AGAIN_S = 5.0
"""How long to wait after a try that failed: the server may be away, or not yet know that the last holder is gone."""


class LivenessLock:
    """Takes and watches the lock of one worker."""

    def __init__(self, settings: Settings, setting: str = "sidejob_database_url") -> None:
        """`setting` is where the store's URL comes from."""
        self._settings = settings
        self._setting = setting
        self._executor: OwnExecutor | None = None
        self._again_at = float("-inf")
        self.lost = False
        """Whether its connection was dropped: it is free now."""
        self.lost_at = float("-inf")
        """When that happened last: other workers' locks have probably fallen too."""

    @property
    def held(self) -> bool:
        """Whether it was taken and has not been lost, as far as is known."""
        return self._executor is not None and not self.lost

    @property
    def is_due(self) -> bool:
        """Whether it is not held and it is time to try to take it."""
        return not self.held and time.monotonic() >= self._again_at

    def take(self, worker_id: int, beating: OwnExecutor) -> bool:
        """Take it for this identity, and tell the others by `beating` whether its absence means anything."""
        self.close()
        reason = self._take(worker_id, beating)
        if reason is not None:
            logger.warning("No liveness lock: %s. If this worker dies, its silence for %g s tells.",
                           reason, self._settings.lease)  # fmt: skip
            self.close()
        workers.announce_lock(beating, worker_id, reason is None)
        return reason is None

    def dropped_within(self, timeout_s: float) -> bool:
        """Wait, and tell whether its connection is gone; only while it is held."""
        if self._executor is not None:
            self.lost = self._executor.dropped_within(timeout_s)
            if self.lost:
                self.lost_at = time.monotonic()
        return self.lost

    def close(self) -> None:
        """Let go of it."""
        self.lost = False
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def _take(self, worker_id: int, beating: OwnExecutor) -> str | None:
        """Take it; returns why not."""
        settings = self._settings
        url, schema = settings.direct_url or settings.require_database_url(), settings.schema
        setting = "sidejob_direct_url" if settings.direct_url else self._setting
        self._again_at = float("inf")  # where it makes no sense it stays so
        try:
            self._executor = Opener(url, schema, prepare=False, setting=setting).connect()
        except StoreUnavailableError as error:
            self._again_at = time.monotonic() + AGAIN_S
            return str(error).rstrip(".")
        if self._executor.pooled:
            past = settings.direct_url or self._setting != "sidejob_database_url"
            wanted = "it must lead past it" if past else "set sidejob_direct_url to lead past it"
            return f"{setting} leads through a pooling proxy; {wanted}"
        if not workers.take_lock(self._executor, worker_id, schema):
            self._again_at = time.monotonic() + AGAIN_S
            return "somebody holds it just now; it is tried again"
        if not workers.lock_is_seen(beating, worker_id, schema):
            return f"{setting} leads to another database than {self._setting}, where nobody would see it"
        self._again_at = float("-inf")
        return None

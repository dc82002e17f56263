"""The signs of a worker's life: its liveness lock for other workers, and its heartbeat file for observers outside.

The lock is an advisory lock of a session, which is freed when the process holding its connection dies. By this lock
other workers learn within seconds that a worker is dead. It needs a session of the worker's own in the store's
database. A pooling proxy would leave it on a session that others use, and a dead worker would seem alive. Behind such a
proxy the lock is not taken, and only silence shows that a worker is dead.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from ...model.errors import SettingsError, StoreUnavailableError
from ...model.logger import logger
from ...model.settings import Settings
from ...store import workers
from ...store.connection.opening import Opener
from ...store.connection.own_executor import OwnExecutor

AGAIN_S = 5.0
"""Seconds to wait after a failed try: the server may be down, or may not yet know that the last holder is gone."""


class LivenessLock:
    """Takes and watches the lock of one worker."""

    def __init__(self, settings: Settings, setting: str = "sidejob_database_url") -> None:
        """`setting` names the setting that holds the store's URL."""
        self._settings = settings
        self._setting = setting
        self._executor: OwnExecutor | None = None
        self._again_at = float("-inf")
        self.lost = False
        """Whether the connection was dropped: the lock is free now."""
        self.lost_at = float("-inf")
        """When the lock was last lost: other workers' locks have probably been freed too."""

    @property
    def held(self) -> bool:
        """Whether the lock was taken and, as far as is known, not lost."""
        return self._executor is not None and not self.lost

    @property
    def is_due(self) -> bool:
        """Whether the lock is not held and it is time to try to take it."""
        return not self.held and time.monotonic() >= self._again_at

    def take(self, worker_id: int, beating: OwnExecutor) -> bool:
        """Take the lock for this identity; `beating` tells the others whether a free lock is proof of death."""
        self.close()
        reason = self._take(worker_id, beating)
        if reason is not None:
            logger.warning(
                "No liveness lock: %s. If this worker dies, its silence for %g s tells.", reason, self._settings.lease
            )
            self.close()
        workers.announce_lock(beating, worker_id, reason is None)
        return reason is None

    def dropped_within(self, timeout_s: float) -> bool:
        """Wait, and tell whether the lock's connection is gone; call it only while the lock is held."""
        if self._executor is not None:
            self.lost = self._executor.dropped_within(timeout_s)
            if self.lost:
                self.lost_at = time.monotonic()
        return self.lost

    def close(self) -> None:
        """Release the lock."""
        self.lost = False
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    def _take(self, worker_id: int, beating: OwnExecutor) -> str | None:
        """Take the lock; return None, or the reason why it was not taken."""
        settings = self._settings
        url, schema = settings.direct_url or settings.require_database_url(), settings.schema
        setting = "sidejob_direct_url" if settings.direct_url else self._setting
        self._again_at = float("inf")  # stays so where the lock makes no sense
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
            return "another session holds it just now; it is tried again"
        if not workers.lock_is_seen(beating, worker_id, schema):
            return f"{setting} leads to another database than {self._setting}, where nobody would see it"
        self._again_at = float("-inf")
        return None


class HeartbeatFile:
    """Touches `sidejob_heartbeat_file` while the heartbeat's loop runs, whether or not the store answers.

    The file grows old when the heartbeat has stopped, but not when the store is down: killing a worker that waits for
    its store does not help. A worker that is killed leaves the file behind, and the file grows old.
    """

    def __init__(self, path: str, *, every_s: float) -> None:
        self._path = Path(path)
        self._every_s = every_s
        self._touched_at = float("-inf")
        self._failing = False

    def clear(self) -> None:
        """Remove the file of an earlier worker; SettingsError if the file cannot be written.

        Without that error the worker would run, and its probe would have it killed again and again. Whether the
        directory can be written is tried with another file, since a probe that saw this one would call the worker up.
        """
        try:
            TemporaryFile(dir=self._path.parent).close()
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(
                f"sidejob_heartbeat_file {str(self._path)!r} cannot be written ({error.strerror}): name a file in a "
                "directory that exists and that the worker may write to."
            ) from error

    def touch(self) -> None:
        """Touch the file if it is time; never raises."""
        now = time.monotonic()
        if now - self._touched_at < self._every_s:
            return
        try:
            try:
                os.utime(self._path)  # touching needs no disk space
            except FileNotFoundError:
                self._path.touch()
        except OSError as error:
            if not self._failing:
                logger.warning("sidejob_heartbeat_file cannot be touched: %s", error)
            self._failing = True
        else:
            self._touched_at, self._failing = now, False

    def remove(self) -> None:
        """Remove the file: this worker has stopped."""
        with suppress(OSError):
            self._path.unlink()

"""The file by which an outside observer, such as a Kubernetes probe, sees that a worker's heartbeat is running."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from ...model.errors import SettingsError
from ...model.logger import logger


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

"""The sweeper's thread for the result backend: a backend that is silent holds up its callers for minutes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ...store.connection.turns import take_turns
from ..loop import Turn

logger = logging.getLogger("celery_sidejob")


class BackendThread:
    """Does one thing at a time that calls the backend; without `apart` in the sweeper's own thread."""

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self._speaking: threading.Thread | None = None
        self._turn = Turn()

    @property
    def is_busy(self) -> bool:
        """Whether the last thing is not done yet."""
        return self._speaking is not None and self._speaking.is_alive()

    def do(self, work: Callable[[], Any]) -> bool:
        """Have it done; False if the last thing is not done yet."""
        if not self._apart:
            work()
            return True
        if self.is_busy:
            return False
        self._speaking = threading.Thread(target=self._run, args=(work,), name="sidejob-results", daemon=True)
        self._speaking.start()
        return True

    def _run(self, work: Callable[[], Any]) -> None:
        take_turns()
        try:
            with self._turn:
                work()
        except Exception:
            logger.exception("Results could not be brought to the backend; it is tried again")

"""The sweeper's thread for the result backend: a silent backend would block the sweeper for minutes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ...store.connection.turns import take_turns
from ..loop import Turn

logger = logging.getLogger("celery_sidejob")


class BackendThread:
    """Does one call of the backend at a time; without `apart`, in the sweeper's own thread."""

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self._speaking: threading.Thread | None = None
        self._turn = Turn()

    @property
    def is_busy(self) -> bool:
        """Whether the last call is still in progress."""
        return self._speaking is not None and self._speaking.is_alive()

    def do(self, work: Callable[[], Any]) -> bool:
        """Start `work`; False if the last call is still in progress."""
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

"""The one loop of the package: it runs a service again and again in a thread until it is stopped."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

logger = logging.getLogger("celery_sidejob")


class Service(Protocol):
    """Something that is to be done again and again."""

    name: str

    def run_once(self) -> Any:
        """Do the work that is due and report it."""
        ...

    def wait_s(self) -> float:
        """Return how long to wait before the next time."""
        ...

    def close(self) -> None:
        """Let go of everything at the loop's end."""
        ...


class Loop:
    """Runs one service in a native thread of its own; what it raises is logged and does not end the loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stopped = threading.Event()
        self._nudged = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sidejob-{service.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def nudge(self) -> None:
        """Have the service run now."""
        self._nudged.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Finish the present turn and end."""
        self._stopped.set()
        self._nudged.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._service.run_once()
                failures = 0
            except Exception as error:
                failures += 1
                if failures in (1, 10) or failures % 100 == 0:
                    logger.warning("%s failed (%d times in a row): %s", self._service.name, failures, error)
            wait_s = self._service.wait_s()
            self._nudged.wait(wait_s if not failures else max(wait_s, min(0.2 * 2**failures, 2.0)))
            self._nudged.clear()
        self._service.close()

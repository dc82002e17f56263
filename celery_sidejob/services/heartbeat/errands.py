"""What a worker's event loop wants done in the store: it must not wait for that itself, nor may the heartbeat."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ...model.errors import StoreUnavailableError

logger = logging.getLogger("celery_sidejob")

WAIT_S = 0.1


class Errands:
    """Does one thing after the other: ending a revoked run waits for whoever has its job locked."""

    def __init__(self, name: str = "errands") -> None:
        self.name = name
        self._waiting: deque[Callable[[], None]] = deque()
        self._one_at_a_time = threading.Lock()

    def soon(self, errand: Callable[[], None]) -> None:
        """Have `errand` done at the next turn; from any thread, and safe in a signal handler."""
        self._waiting.append(errand)

    @property
    def waiting(self) -> bool:
        """Whether something is wanted or being done."""
        return bool(self._waiting)

    def run_once(self) -> int:
        """Do what is wanted, and return how much that was; while the store is away it stays wanted."""
        done = 0
        with self._one_at_a_time:
            while self._waiting:
                try:
                    self._waiting[0]()
                except StoreUnavailableError:
                    raise
                except Exception:
                    logger.exception(
                        "Something could not be done in time; what the store still knows of is made up for later"
                    )
                self._waiting.popleft()
                done += 1
        return done

    def wait_s(self) -> float:
        """Return how long to wait."""
        return WAIT_S

    def close(self) -> None:
        """Do what is still wanted: the worker leaves, and what it then holds is run again."""
        try:
            self.run_once()
        except StoreUnavailableError as error:
            logger.warning("Could not end what was revoked or took too long; it runs again: %s", error)

"""Work in the store that a worker's event loop asks for. Neither the event loop nor the heartbeat may wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...store.errors import RowsLocked

WAIT_S = 0.1


class Errands:
    """Does one errand after the other: ending a revoked run waits for any transaction that has its job locked."""

    def __init__(self, name: str = "errands") -> None:
        self.name = name
        self._waiting: deque[Callable[[], None]] = deque()
        self._one_at_a_time = threading.Lock()

    def soon(self, errand: Callable[[], None]) -> None:
        """Queue `errand` for the next turn; callable from any thread and from a signal handler."""
        self._waiting.append(errand)

    @property
    def waiting(self) -> bool:
        """Whether an errand is queued or in progress."""
        return bool(self._waiting)

    def run_once(self) -> int:
        """Do the queued errands and return their number; while the store is unavailable they stay queued.

        An errand whose rows somebody's transaction has locked waits behind all others.
        """
        done, locked = 0, list[RowsLocked]()
        with self._one_at_a_time:
            while len(locked) < len(self._waiting):
                try:
                    self._waiting[0]()
                except RowsLocked as error:
                    locked.append(error)
                    self._waiting.rotate(-1)
                    continue
                except StoreUnavailableError:
                    raise
                except Exception:
                    logger.exception(
                        "Something could not be done in time; the sweeper makes up for it where the store has a trace"
                    )
                self._waiting.popleft()
                done += 1
        if locked:
            raise locked[0]
        return done

    def wait_s(self) -> float:
        """Return how long to wait."""
        return WAIT_S

    def close(self) -> None:
        """Do the errands that are left: the worker stops, and the runs it then still holds run again."""
        try:
            self.run_once()
        except StoreUnavailableError as error:
            logger.warning("Could not end runs that were revoked or took too long; they run again: %s", error)

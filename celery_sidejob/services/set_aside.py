"""Sets a job that fails in the sweeper aside for a while, so that it does not stop the other jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..model.errors import StoreUnavailableError
from ..model.logger import log_row_error, logger
from ..store.errors import RowsLocked

SET_ASIDE_S = 5.0


class SetAside:
    """The jobs and channels that are set aside at present, and the work that failed for each."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int | str], float] = {}

    @contextmanager
    def by_itself(self, what: str, name: int | str, *, kind: str = "Job") -> Iterator[bool]:
        """Do some work for one job; the job's own error is logged, and that work is set aside for a while.

        Work that needs a row locked by another transaction is set aside too. Yields whether to do the work now. An
        unavailable store is not the job's own error: it ends the turn.
        """
        now = time.monotonic()
        if self._until.get((what, name), now) > now:
            yield False
            return
        self._until.pop((what, name), None)
        try:
            yield True
        except RowsLocked as error:
            self._until[what, name] = time.monotonic() + SET_ASIDE_S
            logger.warning("%s %s is set aside for %g s, its %s waits: %s", kind, name, SET_ASIDE_S, what, error)
        except StoreUnavailableError:
            raise
        except Exception:
            self._until[what, name] = now + SET_ASIDE_S
            log_row_error(name, f"{kind} %s is set aside for %g s, its %s failed", name, SET_ASIDE_S, what)

"""One job that cannot be seen to keeps no others from it: it is left alone for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..model.errors import StoreUnavailableError
from ..model.troubles import log_trouble

logger = logging.getLogger("celery_sidejob")

SET_ASIDE_S = 5.0


class SetAside:
    """Which jobs are left alone just now, and what could not be done for them."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int], float] = {}

    @contextmanager
    def by_itself(self, what: str, job_id: int) -> Iterator[bool]:
        """Do something for one job; an error that is its own is logged, and it is left alone for a while.

        Yields whether it is to be done now. A store that is away is no job's own error: the turn ends.
        """
        now = time.monotonic()
        if self._until.get((what, job_id), now) > now:
            yield False
            return
        self._until.pop((what, job_id), None)
        try:
            yield True
        except StoreUnavailableError:
            raise
        except Exception:
            self._until[what, job_id] = now + SET_ASIDE_S
            log_trouble(logger, job_id, "Job %d is set aside for %g s, its %s failed", job_id, SET_ASIDE_S, what)

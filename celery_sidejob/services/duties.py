"""What a service does in one turn: one thing after the other, and one that fails keeps no other from being done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..model.errors import StoreUnavailableError
from ..store.errors import RowsLocked

logger = logging.getLogger("celery_sidejob")


class Duties:
    """Does them in their order; behind a duty that cut short two turns the next turn begins."""

    def __init__(self, *duties: Callable[[], object]) -> None:
        self._duties: Sequence[Callable[[], object]] = duties
        self._first = 0
        self._cutting: set[int] = set()
        """Those that have cut a turn short since the last whole one."""

    def do(self) -> None:
        """Do all, then raise the first error there was; others are logged.

        A store that is away ends the turn: each further duty might wait for it as long. But an error that looks so may
        be of one statement alone, which must not keep those behind it from being ever done.
        """
        failure: Exception | None = None
        count, first = len(self._duties), self._first
        self._first = 0
        cut = None
        for place in range(first, first + count):
            try:
                self._duties[place % count]()
            except Exception as error:
                if failure is None:
                    failure = error
                else:
                    logger.warning("A duty failed after another one had: %s", error, exc_info=True)
                if isinstance(error, StoreUnavailableError) and not isinstance(error, RowsLocked):
                    cut = place % count
                    break
        if cut in self._cutting:
            self._first = (cut + 1) % count
        self._cutting = set() if cut is None else self._cutting | {cut}
        if failure is not None:
            raise failure

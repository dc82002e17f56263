"""Dooms ordinary durable tasks that the transport has put into its dead list; an entry of a job has no effect."""

from __future__ import annotations

import logging

from ...model.broker_view import Buried, Cursor
from ...model.errors import StoreUnavailableError
from ...model.row_errors import log_row_error
from ...operations import burials
from ..duty import Report
from .sweep import Sweep, SweepDuty

logger = logging.getLogger("celery_sidejob")


class DeadList(SweepDuty):
    """Reads the transport's dead list to its end; leaves tasks that are not durable there for a person to decide.

    If the process dies before an entry is removed, the entry stays. The next sweeper then finds the row doomed, or in
    the dead set.
    """

    def __init__(self, sweep: Sweep) -> None:
        super().__init__(sweep)
        self._cursor = Cursor()

    def _do(self, report: Report) -> None:
        broker = self._runtime.broker
        while self._may_publish():
            cursor, page = broker.buried(self._cursor)
            if not page:
                self._cursor = cursor
                return
            seen_to = [one.text for one in page if one.is_doorbell or self._poison(one)]
            if seen_to and not broker.forget_buried(seen_to):
                return
            self._cursor = cursor.past([one.text for one in page if one.text not in seen_to])

    def _poison(self, buried: Buried) -> bool:
        """Doom the row of a message if this store has it; tell whether it has, or had."""
        stores = self._runtime.stores
        if buried.key is None or (stores.several and buried.store not in (None, stores.name_of(self._runtime.store))):
            return False
        try:
            return burials.poison(self._runtime, buried.key)
        except StoreUnavailableError:
            raise
        except Exception:  # the entries behind it must not wait
            text = "What the dead list of the transport has of task %.100r was left there"
            log_row_error(logger, buried.key, text, buried.key[0])
            return False

"""Connections that time what a worker does all day: claims and commits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from ..model.measures import TIMED, Measures
from . import counters
from .connection.connections import Connections
from .connection.own_executor import OwnExecutor
from .errors import OutcomeUnknown
from .statement import Transaction

T = TypeVar("T")

logger = logging.getLogger("celery_sidejob")

EVERY_S = 10.0
"""How often a busy process stores what it has counted."""


class MeasuredConnections(Connections):
    """Times the transactions of runs, and stores what this process has counted on a connection it has anyway."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.measures = Measures()

    def transact(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, within_s: float | None = None
    ) -> T:
        """Run `work` in one transaction, as `Connections` does, from asking for a connection to the commit's answer."""
        if name not in TIMED or not self.measures.begun:
            return super().transact(name, work, single=single, within_s=within_s)
        began = time.monotonic()
        result = super().transact(name, work, single=single, within_s=within_s)
        self.measures.time(name, time.monotonic() - began)
        if self.measures.age_s >= EVERY_S:
            self.record()  # by the thread whose connection has just become free, so that it takes no further one
        return result

    def record(self) -> bool:
        """Add what was counted since the last time to the totals in the store; False if there was nothing to store.

        Never raises for the store: a count must not be in the way of what it counts.
        """
        taken = self.measures.take()
        if not taken:
            return False

        def add(executor: Transaction) -> None:
            counters.add(executor, taken)

        try:
            super().transact("record", add, single=True)
        except (OutcomeUnknown, SchemaError) as error:  # rather too little than twice
            logger.debug("What was counted is not stored: %s", error)
        except StoreUnavailableError as error:
            self.measures.give_back(taken)
            logger.debug("What was counted is stored later: %s", error)
        return True

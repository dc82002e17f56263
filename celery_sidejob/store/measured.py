"""Connections that time the most frequent transactions of a worker: claims and commits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from ..model.logger import logger
from ..model.measures import Measures
from . import counters, history, tallies
from .connection.connections import Connections
from .connection.own_executor import OwnExecutor
from .errors import OutcomeUnknown

T = TypeVar("T")

EVERY_S = 10.0
"""Seconds after which a busy process stores its counts."""


class MeasuredConnections(Connections):
    """Times the transactions of runs, and stores this process's counts on a connection that is open anyway."""

    def __init__(self, *args: Any, task_history: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.measures = Measures(task_history=task_history)

    def timed(
        self, name: str, work: Callable[[OwnExecutor], T], *, single: bool = False, within_s: float | None = None
    ) -> T:
        """Run `work` like `transact`; time it from the request for a connection to the answer to the commit."""
        began = time.monotonic()
        result = self.transact(name, work, single=single, within_s=within_s)
        self.measures.time(name, time.monotonic() - began)
        if self.measures.begun and self.measures.age_s >= EVERY_S:
            self.record()  # in the thread whose connection has just become free, so that no other is opened
        return result

    def record(self) -> bool:
        """Add the counts since the last call to the totals in the store; False if there was nothing to store.

        Never raises for the store: a count must not disturb the work that it counts.
        """
        taken = self.measures.take()
        if not taken:
            return False

        def add(executor: OwnExecutor) -> None:
            if taken.totals:
                counters.add(executor, taken.totals)
            if taken.tallies:
                tallies.add(executor, tallies.bounded(executor, taken.tallies))
            if taken.finished:
                history.add_tasks(executor, taken.finished, keep=self.measures.task_history)

        single = sum(map(bool, taken)) == 1 and not any(tally.step for tally in taken.tallies)
        try:
            self.transact("record", add, single=single)
        except (OutcomeUnknown, SchemaError) as error:  # counting too little is better than counting twice
            logger.debug("The counts are not stored: %s", error)
        except StoreUnavailableError as error:
            self.measures.give_back(taken)
            logger.debug("The counts are stored later: %s", error)
        return True

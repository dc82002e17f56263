"""The state that the duties of one sweeper share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ...model.logger import logger
from ...operations.runtime import Runtime
from ...store.connection.turns import take_turns
from ..duty import Duty, SetAside
from ..heartbeat.heartbeat import Heartbeat
from ..loop import turn
from .backlog import Backlog


class Sweep:
    """One store, the worker that sweeps it (None for a sweep by hand), and the state that its duties share.

    In the middle of a long turn, `may_go_on` tells whether this worker is still the sweeper.
    """

    def __init__(
        self, runtime: Runtime, worker: Heartbeat | None = None, may_go_on: Callable[[], bool] = lambda: True
    ) -> None:
        self.runtime = runtime
        self.worker = worker
        self.may_go_on = may_go_on
        self.aside = SetAside()
        self.backlog = Backlog(runtime, may_go_on)
        self.backend = BackendThread(apart=worker is not None)
        self.trouble_at = float("-inf")
        """When the store was last unavailable."""
        self.suspects = False
        """Whether a worker may be dead, so that the next turn comes sooner."""
        self.has_schedules = True
        """Whether some schedule has a time to come, as last read with the worker's lease; a sweep by hand assumes it.
        """
        self.has_batches = True
        """The same for a batch that has not ended."""
        self.has_dead = False
        """Whether a worker was declared dead and is not forgotten yet."""


PAGE = 200
"""How many rows a duty reads at once, unless it has a reason for another number."""
SLICE_S = 0.25
"""Seconds after which a long duty begins no further work in this turn."""
TURN_S = 0.45
"""The least seconds between two executions of a duty that is not urgent, in a worker: two ticks (`TICK_S`)."""


class SweepDuty(Duty):
    """A duty of the sweeper."""

    is_urgent = False
    """Whether a worker does the duty at each tick."""

    def __init__(self, sweep: Sweep) -> None:
        if sweep.worker is not None and not self.is_urgent:
            self.interval_s = max(self.interval_s, TURN_S)
        self._sweep = sweep
        self._runtime = sweep.runtime
        self._connections = sweep.runtime.connections

    def _must_stop(self, until: float) -> bool:
        """Tell whether a long duty must stop: at `until` a worker keeps the rest for its next turn, which comes soon.

        A sweep by hand goes on to the end. A worker stops at once when another worker has become the sweeper.
        """
        if self._sweep.worker is not None and time.monotonic() >= until:
            self.due_at = time.monotonic()
            return True
        return not self._sweep.may_go_on()

    def _may_publish(self) -> bool:
        return self._runtime.broker.ready and self._sweep.may_go_on()


class BackendThread:
    """Does one call of the result backend at a time, in another thread; without `apart`, in the sweeper's own thread.

    In the sweeper's thread a silent backend would block the sweeper for minutes.
    """

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart
        self._speaking: threading.Thread | None = None
        self._turn = turn()

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

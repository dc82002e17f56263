"""Looks for what is due, missing or lost in the store, and sets it going again.

One sweeper at a time per schema, by a leased row; several would only be wasteful. It reads a page of candidates
without locks, then acts on one job per transaction. No row lock is held during a network call, one bad row is set
aside, and no step depends on the size of a queue.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..model.crash_points import reach
from ..model.errors import StoreUnavailableError
from ..model.messages import Continuation, Outcome
from ..operations import recovery
from ..operations.runtime import Runtime, doorbell
from ..operations.unit_of_work import apply_noted_asks
from ..store import askings, asks, claims, messages, workers
from .pruner import PRUNE_S, Pruner

logger = logging.getLogger("celery_sidejob")

TICK_S = 0.5
FOLLOW_S = 2.0
"""How often a worker that does not sweep looks whether it should: a dead sweeper is followed within this."""
LEASE_S = 3.0
TROUBLE_S = 10.0
"""After the store was away a free lock means nothing for so long: its owners may still be on their way back."""
PAGE = 200
"""Messages of one queue, timers and results looked at in one step."""
PAGES = 20
"""Steps of one turn, after which the other duties come first again."""
RESULT_GRACE_S = 5.0
"""How long the process that ended an asking has to store its result itself."""
MARKER_S = 3.0
SET_ASIDE_S = 5.0


@dataclass(slots=True)
class PollReport:
    """What one sweep found and did."""

    published: int = 0
    missing: int = 0
    timers: int = 0
    rescued: int = 0
    declared_dead: int = 0
    results: int = 0
    unpublished: int = 0
    broker_emptied: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


class Sweeper:
    """Sweeps one schema."""

    name = "sweeper"

    def __init__(self, runtime: Runtime, worker_id: Callable[[], int] | None = None) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._worker_id = worker_id
        self._pruner = Pruner(runtime)
        self._sweeps = worker_id is None
        self._suspects = False
        self._reserved: list[str] = []
        self._trouble_at = float("-inf")
        self._looked_at: dict[str, float] = {}
        self._settling: threading.Thread | None = None
        self._emptied = False  # the broker tells only once

    def run_once(self) -> PollReport | None:
        """Sweep once, if this worker is the schema's sweeper; None if another one is."""
        try:
            if self._worker_id is not None:
                self._sweeps = self._runtime.connections.transact("lease", self._hold_lease)
                if not self._sweeps:
                    return None
            return self._sweep()
        except StoreUnavailableError:
            self._trouble_at = time.monotonic()
            raise

    def wait_s(self) -> float:
        """Return how long to wait: shorter while somebody is suspected, longer while another sweeps."""
        if not self._sweeps:
            return FOLLOW_S
        return 0.1 if self._suspects else TICK_S

    def close(self) -> None:
        """Nothing is held between turns; the lease is given up by the worker's leaving."""

    def _hold_lease(self, executor: Any) -> bool:
        assert self._worker_id is not None
        return workers.hold_sweeper_lease(executor, self._worker_id(), schema=self._settings.schema, lease_s=LEASE_S)

    def _sweep(self) -> PollReport:
        report = PollReport()
        reach("sweep:before")
        self._look_at_workers(report)
        if self._is_time("strays", self._settings.lease):
            for stray in claims.held_by_nobody(self._runtime.connections, PAGE):
                report.rescued += recovery.take_back(
                    self._runtime, stray.job_id, run_no=stray.run_no, worker_id=stray.worker_id, own=False, loss=True
                )
        self._mature_timers(report)
        if self._runtime.publisher.ready:
            self._look_for_an_emptied_broker(report)
            self._publish(report)
        if self._is_time("results", RESULT_GRACE_S / 2):
            self._store_results(report)
        if self._is_time("prune", PRUNE_S):
            self._pruner.run_once()
        return report

    # -- workers -------------------------------------------------------------------------------------------------

    def _look_at_workers(self, report: PollReport) -> None:
        """Suspect, declare dead, rescue: each a step of its own, and irrevocable only after two observations."""
        connections = self._runtime.connections
        silence_s = self._settings.lease / 2
        trouble = time.monotonic() - self._trouble_at < TROUBLE_S
        self._suspects = False
        gone = False
        for row in workers.liveness(connections, schema=self._settings.schema, silence_s=silence_s):
            dead = row.dead_at is not None
            if not dead and row.suspect_at is None:
                by = "lock" if row.lock_free and not (row.restarted or trouble) else "silence" if row.silent else None
                if by is not None:
                    self._suspects |= workers.suspect(connections, row.id, by=by, seen=row.beat_at)
            elif not dead:
                self._suspects |= row.suspect_by == "lock"
                dead = workers.declare_dead(
                    connections, row.id, lock_grace_s=self._settings.lock_grace, silence_s=silence_s
                )
                report.declared_dead += dead
            if dead:
                gone = True
                self._rescue(row.id, report)
        if gone:
            workers.forget_dead(connections)

    def _rescue(self, worker_id: int, report: PollReport) -> None:
        """Take the runs of a dead worker back, one job per transaction."""
        for held in claims.held_by(self._runtime.connections, worker_id):
            reach("rescue:before")
            report.rescued += recovery.take_back(
                self._runtime, held.job_id, run_no=held.run_no, worker_id=worker_id, own=False, loss=True
            )

    # -- timers --------------------------------------------------------------------------------------------------

    def _mature_timers(self, report: PollReport) -> None:
        for job_id in asks.due(self._runtime.connections, PAGE):
            apply_noted_asks(self._runtime, [job_id])
            report.timers += 1

    # -- messages ------------------------------------------------------------------------------------------------

    def _look_for_an_emptied_broker(self, report: PollReport) -> None:
        """Have everything published again that the broker no longer has: copies are harmless."""
        if not self._emptied:
            self._emptied = self._is_time("marker", MARKER_S) and self._runtime.publisher.was_emptied()
        if not self._emptied:
            return
        report.broker_emptied = True
        after: int | None = 0
        while after is not None:
            page_after = after

            def work(executor: Any, page_after: int = page_after) -> int | None:
                return messages.look_now(executor, after=page_after, limit=1000)

            after = self._runtime.connections.transact("look-now", work)
        self._emptied = False

    def _publish(self, report: PollReport) -> None:
        """Publish what is due and unpublished, or published and not heard of; fair by queue, oldest first."""
        if self._reserved:  # by a turn that failed
            messages.still_unpublished(self._runtime.connections, self._reserved, 0)
        for _ in range(PAGES):
            self._reserved = found = messages.candidates(self._runtime.connections, PAGE)
            if not found:
                return

            def reserve(executor: Any, found: list[str] = found) -> Any:
                return messages.reserve(executor, found)

            rows = self._runtime.connections.transact("reserve", reserve)
            report.missing += sum(row.missing for row in rows)
            rows = sorted(rows, key=lambda row: -row.waited_s)
            bells = [doorbell(row) for row in rows if row.job_id is not None]
            continuations = [
                Continuation.of_row(row.task_id, row.queue, row.publication) for row in rows if row.publication
            ]
            reach("sweep:before-publish")
            sent = self._runtime.dispatch(bells, continuations)
            report.published += sent
            self._reserved = []
            if sent == len(rows):
                continue
            report.unpublished += len(rows) - sent
            if not self._runtime.publisher.ready:
                self._set_aside(rows)
                return
            # Otherwise it is these rows that cannot be published: they wait for the end of their reservation.

    def _set_aside(self, rows: Any) -> None:
        """Look again soon at what a broker that is away did not take: it need not wait for the whole reservation."""
        messages.still_unpublished(self._runtime.connections, [row.task_id for row in rows], SET_ASIDE_S)

    # -- results -------------------------------------------------------------------------------------------------

    def _store_results(self, report: PollReport) -> None:
        """Bring results to the backend that the process which ended the asking could not.

        A backend that is silent holds up whoever speaks to it, for minutes: a worker's sweeper leaves that to a thread.
        """
        if self._settling is not None and self._settling.is_alive():
            return
        rows = askings.unsent(self._runtime.connections, older_than_s=RESULT_GRACE_S, limit=PAGE)
        if self._worker_id is None:
            report.results += self._runtime.settle(_outcome(row) for row in rows)
        elif rows:
            self._settling = threading.Thread(target=self._settle, args=(rows,), name="sidejob-results", daemon=True)
            self._settling.start()

    def _settle(self, rows: Sequence[Any]) -> None:
        try:
            self._runtime.settle(_outcome(row) for row in rows)
        except Exception:
            logger.exception("Results could not be brought to the backend; it is tried again")

    def _is_time(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._looked_at.get(what, float("-inf")) < every_s:
            return False
        self._looked_at[what] = now
        return True


def _outcome(row: Any) -> Outcome:
    return Outcome(
        row.task_id, row.job_id, row.task, row.queue, row.outcome, row.result,
        json.loads(row.options) if row.options else None, row.args, row.kwargs,
    )  # fmt: skip

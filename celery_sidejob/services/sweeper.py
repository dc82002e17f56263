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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ..model.crash_points import reach
from ..model.errors import StoreUnavailableError
from ..model.messages import GONE, Continuation, Doorbell, Outcome
from ..operations import recovery
from ..operations.noted_asks import apply_noted_asks
from ..operations.runtime import Runtime
from ..store import askings, asks, claims, messages, workers
from ..store.errors import RowsLocked
from ..store.statement import Executor
from ..store.turns import take_turns
from .backlog import LOOK_PAGE, Backlog
from .loop import Turn
from .poller import Poller
from .pruner import PRUNE_S, Pruner

logger = logging.getLogger("celery_sidejob")

TICK_S = 0.5
WATCH_S = 0.1
"""How often a worker that does not sweep looks whether its own beat has found that it should."""
LEASE_S = 2.0
"""For how long a sweeper that is not heard of keeps the others from sweeping; one whose lock is free does not."""
RENEW_S = 0.75
TROUBLE_S = 10.0
"""After the store was away a free lock means nothing for so long: its owners may still be on their way back."""
PAGE = 200
"""Messages of one queue, timers and results looked at in one step."""
PAGES = 20
"""Steps of one turn, after which the other duties come first again."""
RESULT_GRACE_S = 5.0
"""How long the process that ended an asking has to store its result itself."""
MARKER_S = 3.0
QUEUES_S = 3.0
SET_ASIDE_S = 5.0
"""How long what failed is left alone: messages that a broker did not take, and jobs with an error of their own."""


@dataclass(slots=True)
class PollReport:
    """What one sweep found and did; false if nothing, and a suspicion alone is nothing."""

    published: int = 0
    missing: int = 0
    timers: int = 0
    rescued: int = 0
    declared_dead: int = 0
    suspected: int = 0
    results: int = 0
    unpublished: int = 0
    tasks_taken: int = 0
    tasks_buried: int = 0
    broker_emptied: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self) if field.name != "suspected")

    def __iadd__(self, other: PollReport) -> PollReport:
        """Count what another sweep found and did as well."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, ours or theirs if isinstance(ours, bool) else ours + theirs)
        return self


class Worker(Protocol):
    """The worker whose service a sweeper is: the heartbeat."""

    worker_id: int

    @property
    def lock_lost_at(self) -> float:
        """When its liveness lock fell last: then others' have fallen with it, and mean nothing."""
        ...

    def sweep_is_due(self) -> bool:
        """Tell, once, that nobody seems to sweep."""
        ...


class Sweeper:
    """Sweeps one schema, by itself or, as the service of a worker, while no other worker does."""

    def __init__(self, runtime: Runtime, worker: Worker | None = None) -> None:
        self.name = runtime.called("sweeper")
        self._runtime = runtime
        self._settings = runtime.settings
        self._worker = worker
        self._pruner = Pruner(runtime)
        self._backlog = Backlog(runtime, self._may_sweep)
        apart = self._in_a_thread if worker is not None else _here
        self._poller = Poller(runtime, apart, self._backlog, self._may_sweep)
        self._sweeps = worker is None
        self._renewed_at = float("-inf")
        self._suspects = False
        self._reserved: list[str] = []
        self._trouble_at = float("-inf")
        self._looked_at: dict[str, float] = {}
        self._set_aside_until: dict[tuple[str, int], float] = {}
        self._settling: threading.Thread | None = None
        self._settling_turn = Turn()
        self._results_since: Any = None
        self._emptied = False  # the broker tells only once

    def run_once(self) -> PollReport | None:
        """Sweep once, if this worker is the schema's sweeper; None if another one is."""
        try:
            return self._sweep() if self._may_sweep() else None
        except StoreUnavailableError as error:
            if not isinstance(error, RowsLocked):
                self._trouble_at = time.monotonic()
            raise

    def wait_s(self) -> float:
        """Return how long to wait: shorter while somebody is suspected, longer while another sweeps."""
        if not self._sweeps:
            return WATCH_S
        return 0.1 if self._suspects else TICK_S

    def close(self) -> None:
        """Nothing is held between turns; the lease is given up by the worker's leaving."""

    def _may_sweep(self) -> bool:
        """Hold the lease, renewing it in time also in the middle of a long turn; False while another holds it."""
        if self._worker is None:
            return True
        if not self._sweeps and not self._worker.sweep_is_due():
            return False
        if self._sweeps and time.monotonic() - self._renewed_at < RENEW_S:
            return True
        self._renewed_at = time.monotonic()
        worker_id, schema = self._worker.worker_id, self._settings.schema

        def hold(executor: Executor) -> bool:
            return workers.hold_sweeper_lease(executor, worker_id, schema=schema, lease_s=LEASE_S)

        self._sweeps = self._runtime.connections.transact("lease", hold, single=True)
        return self._sweeps

    def _sweep(self) -> PollReport:
        report = PollReport()
        try:
            self._do_everything(report)
        finally:  # what a turn did before it failed, it did
            observer = self._runtime.observer
            observer.counted("workers_declared_dead", report.declared_dead)
            observer.counted("messages_missing", report.missing)
            observer.counted("broker_emptied", int(report.broker_emptied))
        return report

    def _do_everything(self, report: PollReport) -> None:
        reach("sweep:before")
        self._backlog.begin_turn()
        self._look_at_workers(report)
        if self._is_time("strays", self._settings.lease):
            for stray in claims.held_by_nobody(self._runtime.connections, PAGE):
                self._rescue(stray.job_id, report, run_no=stray.run_no, worker_id=stray.worker_id)
        self._mature_timers(report)
        if self._runtime.publisher.ready:
            self._look_for_an_emptied_broker(report)
            if self._runtime.publisher.knows_queues and self._is_time("queues", QUEUES_S):
                self._look_for_vanished_queues()
            self._publish(report)
        self._poller.run_once(report)
        if self._is_time("results", RESULT_GRACE_S / 2):
            self._store_results(report)
        if self._is_time("prune", PRUNE_S):
            self._pruner.run_once()

    # -- workers -------------------------------------------------------------------------------------------------

    def _look_at_workers(self, report: PollReport) -> None:
        """Suspect, declare dead, rescue: each a step of its own, and irrevocable only after two observations."""
        connections = self._runtime.connections
        silence_s = self._settings.lease / 2
        trouble_at = max(self._trouble_at, self._worker.lock_lost_at if self._worker else self._trouble_at)
        trouble = time.monotonic() - trouble_at < TROUBLE_S
        self._suspects = False
        gone = False
        for row in workers.liveness(connections, schema=self._settings.schema, silence_s=silence_s):
            dead, suspected = row.dead_at is not None, row.suspect_at is not None
            if not dead and not suspected:
                by = "lock" if row.lock_free and not (row.restarted or trouble) else "silence" if row.silent else None
                if by is not None:
                    suspected = workers.suspect(connections, row.id, by=by, seen=row.beat_at)
                    self._suspects |= suspected
            elif not dead and not trouble:  # or its beat may just be on its way back too
                self._suspects |= row.suspect_by == "lock"
                dead = workers.declare_dead(
                    connections, row.id, lock_grace_s=self._settings.lock_grace, silence_s=silence_s
                )
                report.declared_dead += dead
            report.suspected += suspected and not dead
            if dead:
                gone = True
                # A worker that left by itself gave back what it held, but for jobs somebody had locked at that moment.
                self._rescue_all(row.id, report, loss=row.suspect_at is not None)
        if gone:
            workers.forget_dead(connections)

    def _rescue_all(self, worker_id: int, report: PollReport, *, loss: bool) -> None:
        """Rescue the runs of a dead worker, one job per transaction."""
        for held in claims.held_by(self._runtime.connections, worker_id):
            reach("rescue:before")
            self._rescue(held.job_id, report, run_no=held.run_no, worker_id=worker_id, loss=loss)

    def _rescue(self, job_id: int, report: PollReport, **run: Any) -> None:
        with self._by_itself("rescue", job_id) as may:
            report.rescued += may and recovery.rescue(self._runtime, job_id, **run)

    # -- timers --------------------------------------------------------------------------------------------------

    def _mature_timers(self, report: PollReport) -> None:
        for job_id in asks.due(self._runtime.connections, PAGE):
            with self._by_itself("timer", job_id) as may:
                if may:
                    apply_noted_asks(self._runtime, [job_id])
                    report.timers += 1

    # -- messages ------------------------------------------------------------------------------------------------

    def _look_for_an_emptied_broker(self, report: PollReport) -> None:
        """Have everything published again that the broker no longer has: copies are harmless."""
        if not self._emptied:
            self._emptied = self._is_time("marker", MARKER_S) and self._runtime.publisher.was_emptied(
                self._runtime.stores.label_of(self._runtime)
            )
        if not self._emptied:
            return
        report.broker_emptied = True
        after: int | None = 0
        while after is not None:
            page_after = after

            def work(executor: Any, page_after: int = page_after) -> int | None:
                return messages.look_now(executor, after=page_after, limit=LOOK_PAGE)

            after = self._runtime.connections.transact("look-now", work)
        self._emptied = False

    def _look_for_vanished_queues(self) -> None:
        """Have published again what was in a queue that is gone; the publish declares it."""
        for queue in messages.queues_in_broker(self._runtime.connections):
            if self._runtime.publisher.ready_messages(queue) != GONE:
                continue

            def work(executor: Any, queue: str = queue) -> int:
                return messages.look_now_in(executor, queue, limit=LOOK_PAGE)

            while self._runtime.connections.transact("look-now", work) == LOOK_PAGE:
                pass

    def _publish(self, report: PollReport) -> None:
        """Publish what is due and unpublished, or published and not heard of; fair by queue, oldest first."""
        if self._reserved:  # by a turn that failed
            messages.still_unpublished(self._runtime.connections, self._reserved, 0)
        for _ in range(PAGES):
            if not self._may_sweep():
                return
            found = messages.candidates(self._runtime.connections, PAGE)
            if found and self._backlog.pass_over_counted():
                found = messages.candidates(self._runtime.connections, PAGE)
            self._reserved = found
            if not found:
                return

            def reserve(executor: Any, found: list[str] = found) -> Any:
                return messages.reserve(executor, found)

            rows = self._runtime.connections.transact("reserve", reserve)
            report.missing += sum(row.missing for row in rows)
            rows = sorted(rows, key=lambda row: -row.waited_s)
            bells = [Doorbell.of_row(row) for row in rows if row.job_id is not None]
            read = [Continuation.of_row(row.task_id, row.queue, row.publication) for row in rows if row.publication]
            if None in read:  # they wait for the end of their reservation, and for a newer sweeper
                logger.warning("%d continuations are of a newer format than this version reads", read.count(None))
            reach("sweep:before-publish")
            sent = self._runtime.dispatch(bells, filter(None, read))
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
        since = self._results_since
        rows = askings.unsent(self._runtime.connections, older_than_s=RESULT_GRACE_S, limit=PAGE, since=since)
        # The next page next time: what a backend never takes keeps nobody else's result back.
        last = rows[-1].closed_at if len(rows) == PAGE else None
        self._results_since = last if last != since else None
        if self._worker is None:
            report.results += self._runtime.settle(_outcome(row) for row in rows)
        elif rows:
            self._in_a_thread(lambda: self._runtime.settle(_outcome(row) for row in rows))

    def _in_a_thread(self, work: Callable[[], Any]) -> bool:
        """Have one thing at a time done that speaks to the backend; False if the last is not done yet."""
        if self._settling is not None and self._settling.is_alive():
            return False
        self._settling = threading.Thread(target=self._settle, args=(work,), name="sidejob-results", daemon=True)
        self._settling.start()
        return True

    def _settle(self, work: Callable[[], Any]) -> None:
        take_turns()
        try:
            with self._settling_turn:
                work()
        except Exception:
            logger.exception("Results could not be brought to the backend; it is tried again")

    @contextmanager
    def _by_itself(self, what: str, job_id: int) -> Iterator[bool]:
        """Do something for one job; an error that is its own is logged, and it is left alone for a while.

        Yields whether it is to be done now. A store that is away is no job's own error: the turn ends.
        """
        now = time.monotonic()
        if self._set_aside_until.get((what, job_id), now) > now:
            yield False
            return
        self._set_aside_until.pop((what, job_id), None)
        try:
            yield True
        except StoreUnavailableError:
            raise
        except Exception:
            self._set_aside_until[what, job_id] = now + SET_ASIDE_S
            logger.exception("Job %d is set aside for %g s, its %s failed", job_id, SET_ASIDE_S, what)

    def _is_time(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._looked_at.get(what, float("-inf")) < every_s:
            return False
        self._looked_at[what] = now
        return True


def _here(work: Callable[[], None]) -> bool:
    work()
    return True


def _outcome(row: Any) -> Outcome:
    return Outcome(
        row.task_id, row.job_id, row.task, row.queue, row.outcome, row.result,
        json.loads(row.options) if row.options else None, row.args, row.kwargs,
    )  # fmt: skip

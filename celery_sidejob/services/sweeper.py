"""Looks for what is due, missing or lost in the store, and sets it going again.

One sweeper at a time per schema, by a leased row; several would only be wasteful. It reads a page of candidates
without locks, then acts on one job per transaction. No row lock is held during a network call, one bad row is set
aside, and no step depends on the size of a queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ..model.crash_points import reach
from ..model.errors import InvalidValueError, StoreUnavailableError
from ..model.messages import CONTINUATION, GONE, Continuation, Doorbell
from ..model.protocols import Refused
from ..model.sight import Sought
from ..operations import recovery
from ..operations.noted_asks import apply_noted_asks
from ..operations.runtime import Runtime
from ..store import asks, claims, messages, workers
from ..store.errors import RowsLocked
from ..store.messages import LOOK_PAGE
from ..store.statement import Executor
from .backlog import Backlog
from .duties import Duties
from .poller import Poller
from .pruner import LONG_SLICE_S, SLICE_S, Pruner
from .set_aside import SET_ASIDE_S, SetAside
from .unsendable import Unsendable
from .unsent_results import RESULT_GRACE_S, UnsentResults

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
"""Messages of one queue and timers looked at in one step."""
PAGES = 20
"""Steps of one turn, after which the other duties come first again."""
MARKER_S = 3.0
QUEUES_S = 3.0


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
        self._pruner = Pruner(runtime, slice_s=SLICE_S if worker is not None else LONG_SLICE_S)
        self._backlog = Backlog(runtime, self._may_sweep)
        self._results = UnsentResults(runtime, apart=worker is not None)
        self._unsendable = Unsendable(runtime, worker)
        self._poller = Poller(runtime, self._results.apart, self._backlog, self._may_sweep, self._unsendable)
        self._report = PollReport()
        self._duties = Duties(
            self._look_at_workers, self._look_at_strays, self._mature_timers, self._look_for_an_emptied_broker,
            self._look_for_vanished_queues, self._publish, self._poll, self._store_results, self._prune,
        )  # fmt: skip
        self._sweeps = worker is None
        self._renewed_at = float("-inf")
        self._suspects = False
        self._reserved: list[str] = []
        self._trouble_at = float("-inf")
        self._looked_at: dict[str, float] = {}
        self._aside = SetAside()
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
        self._report = report = PollReport()
        reach("sweep:before")
        self._backlog.begin_turn()
        try:
            self._duties.do()
        finally:  # what a turn did before it failed, it did
            observer = self._runtime.observer
            observer.counted("workers_declared_dead", report.declared_dead)
            observer.counted("messages_missing", report.missing)
            observer.counted("broker_emptied", int(report.broker_emptied))
        return report

    def _look_at_strays(self) -> None:
        if self._is_time("strays", self._settings.lease):
            for stray in claims.held_by_nobody(self._runtime.connections, PAGE):
                self._rescue(stray.job_id, run_no=stray.run_no, worker_id=stray.worker_id)

    def _poll(self) -> None:
        self._poller.run_once(self._report)

    def _store_results(self) -> None:
        if self._is_time("results", RESULT_GRACE_S / 2):
            self._report.results += self._results.run_once()

    def _prune(self) -> None:
        if self._pruner.is_due():
            self._pruner.run_once()

    # -- workers -------------------------------------------------------------------------------------------------

    def _look_at_workers(self) -> None:
        """Suspect, declare dead, rescue: each a step of its own, and irrevocable only after two observations."""
        connections, report = self._runtime.connections, self._report
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
                self._rescue_all(row.id, loss=row.suspect_at is not None)
        if gone:
            workers.forget_dead(connections)

    def _rescue_all(self, worker_id: int, *, loss: bool) -> None:
        """Rescue the runs of a dead worker, one job per transaction."""
        for held in claims.held_by(self._runtime.connections, worker_id):
            reach("rescue:before")
            self._rescue(held.job_id, run_no=held.run_no, worker_id=worker_id, loss=loss)

    def _rescue(self, job_id: int, **run: Any) -> None:
        with self._aside.by_itself("rescue", job_id) as may:
            self._report.rescued += may and recovery.rescue(self._runtime, job_id, **run)

    # -- timers --------------------------------------------------------------------------------------------------

    def _mature_timers(self) -> None:
        for job_id in asks.due(self._runtime.connections, PAGE):
            with self._aside.by_itself("timer", job_id) as may:
                if may:
                    apply_noted_asks(self._runtime, [job_id])
                    self._report.timers += 1

    # -- messages ------------------------------------------------------------------------------------------------

    def _look_for_an_emptied_broker(self) -> None:
        """Have everything published again that the broker no longer has, the oldest first."""
        if not self._runtime.publisher.ready:
            return
        if not self._emptied:
            self._emptied = self._is_time("marker", MARKER_S) and self._runtime.publisher.was_emptied(
                self._runtime.stores.label_of(self._runtime)
            )
        if not self._emptied:
            return
        self._report.broker_emptied = True
        self._poller.broker_was_emptied()
        self._emptied = not self._look_at_all()

    def _look_at_all(self) -> bool:
        """Have published again what the broker does not have of jobs; False if that is to be done once more.

        A broker that has not seen a sweeper yet seems to be emptied too, and may have all that was ever published.
        """
        connections = self._runtime.connections
        self._backlog.begin_turn()  # what was seen before says nothing of what is read now
        after, seen_at = 0, None
        while page := messages.unclaimed(connections, after=after):
            seen_at = seen_at or page[0].read_at
            lost = [row for row in page if not self._backlog.is_whole(row.queue)]
            gone = self._backlog.without_what_waits(lost, Sought.of_job)
            if gone is None:
                return False

            def work(executor: Executor, gone: list[str] = gone, seen_at: Any = seen_at) -> None:
                messages.look_again_now(executor, gone, seen_at=seen_at)

            connections.transact("look-now", work)
            after = page[-1].job_id
        return True

    def _look_for_vanished_queues(self) -> None:
        """Have published again what was in a queue that is gone; the publish declares it."""
        publisher = self._runtime.publisher
        if not publisher.ready or not publisher.knows_queues or not self._is_time("queues", QUEUES_S):
            return
        for queue in messages.queues_in_broker(self._runtime.connections):
            if self._runtime.publisher.ready_messages(queue) != GONE:
                continue

            def work(executor: Any, queue: str = queue) -> int:
                return messages.look_now_in(executor, queue)

            while self._runtime.connections.transact("look-now", work) == LOOK_PAGE:
                pass

    def _publish(self) -> None:
        """Publish what is due and unpublished, or published and not heard of; fair by queue, oldest first."""
        if not self._runtime.publisher.ready:
            return
        if self._reserved:  # by a turn that failed
            messages.still_unpublished(self._runtime.connections, self._reserved, 0)
        for _ in range(PAGES):
            if not self._may_sweep() or not self._publish_page():
                return

    def _publish_page(self) -> bool:
        """Publish a page; False if there is none, or nothing can be published just now."""
        found = messages.candidates(self._runtime.connections, PAGE)
        if found and self._backlog.pass_over_counted():
            found = messages.candidates(self._runtime.connections, PAGE)
        self._reserved = found
        if not found:
            return False

        def reserve(executor: Executor) -> Any:
            return messages.reserve(executor, found)

        rows = self._runtime.connections.transact("reserve", reserve)
        self._report.missing += sum(row.missing for row in rows)
        rows = sorted(rows, key=lambda row: (-row.waited_s, row.job_id or 0))
        bells = [Doorbell.of_row(row) for row in rows if row.job_id is not None]
        refused: Refused = []
        continuations = _continuations(rows, refused)
        reach("sweep:before-publish")
        sent = self._runtime.dispatch(bells, continuations, refused=refused)
        self._report.published += sent
        self._reserved = []
        self._report.unpublished += len(rows) - sent
        if sent < len(rows) and not self._runtime.publisher.ready:
            self._set_aside(rows)
            return False
        # Otherwise these rows cannot be published: they wait for the end of their reservation, or are buried.
        self._unsendable.bury(refused)
        return True

    def _set_aside(self, rows: Any) -> None:
        """Look again soon at what a broker that is away did not take: it need not wait for the whole reservation."""
        messages.still_unpublished(self._runtime.connections, [row.task_id for row in rows], SET_ASIDE_S)

    def _is_time(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now - self._looked_at.get(what, float("-inf")) < every_s:
            return False
        self._looked_at[what] = now
        return True


def _continuations(rows: Sequence[Any], refused: Refused) -> list[Continuation]:
    """Read continuations; what nobody can read is refused, what a newer version wrote waits for a newer sweeper."""
    found, newer = [], 0
    for row in rows:
        if not row.publication:
            continue
        try:
            read = Continuation.of_row(row.task_id, row.queue, row.publication)
        except InvalidValueError as error:
            unread = Continuation(row.task_id.removeprefix(CONTINUATION), row.queue, row.publication)
            refused.append((unread, error))
            continue
        if read is None:
            newer += 1
        else:
            found.append(read)
    if newer:
        logger.warning("%d continuations are of a newer format than this version reads", newer)
    return found

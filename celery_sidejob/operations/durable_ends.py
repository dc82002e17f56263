"""The end of a durable task's run: its row goes on as another message, or is removed as its follow-ups are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..model.crash_points import reach
from ..model.durable import Message
from ..model.errors import LeaseLostError, StoreUnavailableError
from ..model.events import TaskEndedWell
from ..store.errors import OutcomeUnknown
from ..store.outbox import holds, latecomers, tasks
from ..store.outbox.tasks import Kept
from ..store.statement import Transaction
from ..store.write_behind import WriteBehind
from . import deferred_locks
from .after_commit import tell
from .durable_locks import has_lock, have_lock
from .durable_runs import ClaimedElsewhereError, Run, lease_lost
from .keeping import waits_of
from .publishing import send
from .retrying import patience_s, patiently
from .runtime import Runtime
from .task_run_end import end_task_runs

logger = logging.getLogger("celery_sidejob")

LATE_END_PATIENCE_S = 3600.0
"""Seconds for which a process keeps trying ends that were given up."""
LATE_END_S = 0.5
"""Seconds after which an end that was given up is tried again."""


def go_on(runtime: Runtime, run: Run, message: Message) -> None:
    """Turn the row of a run into the row of its next message, and publish that message when it is due.

    Tries for a lease if the store is unavailable, because Celery takes a retry that cannot be sent for a failure.
    Raises LeaseLostError if the row was taken from this run.
    """
    have_lock(runtime, run)
    is_unknown = False
    began = time.monotonic()

    def work(executor: Transaction) -> Kept | None:
        end = tasks.move(message, run.key, waits_of(runtime), worker_id=run.worker_id)
        found = end_task_runs(executor, end)
        return Kept(found[0].waits, found[0].generation) if found else None

    def once() -> Kept | None:
        nonlocal is_unknown
        try:
            return runtime.connections.transact("durable-move", work, single=True, within_s=patience_s(runtime))
        except OutcomeUnknown:
            is_unknown = True
            raise

    kept = patiently(runtime, once)
    if kept is None and is_unknown:
        row = tasks.read(runtime.connections, run.key[0])
        if row is not None and row.generation == run.key[1] + 1:
            kept = Kept(waits=not row.unpublished, generation=row.generation)
    if kept is None:
        raise lease_lost(run)
    run.moved = True
    if not kept.waits:
        send(runtime, [replace(message, generation=kept.generation)], since=began)


def counts(runtime: Runtime, run: Run, *, ended_well: bool) -> bool:
    """Tell whether a run counts, before its outcome is reported: it does not if its row was taken from it.

    A run that was called lost and ended well counts if no other run has begun since. From here on none begins: if the
    process dies before `end`, the row is buried as lost. Tries for a lease if the store is unavailable; then the run is
    taken to count, because nothing is known against it.
    """
    if run.is_revoked:
        return False

    def hold(executor: Transaction) -> bool:
        return holds.holds(executor, run.key, worker_id=run.worker_id)

    def keep_from_others(executor: Transaction) -> bool:
        age_s = None if run.late is None else time.monotonic() - run.late.began_at
        return latecomers.keep_from_others(executor, run.key, run.content, age_s=age_s, for_s=runtime.settings.lease)

    def ask(name: str, work: Callable[[Transaction], bool]) -> bool:
        return runtime.connections.transact(name, work, single=True, within_s=patience_s(runtime))

    def once() -> bool:
        is_locked = run.late is None or deferred_locks.of(runtime).take(run)
        return (is_locked and ask("durable-holds", hold)) or (
            ended_well and ask("durable-keep-from-others", keep_from_others)
        )

    try:
        return patiently(runtime, once)
    except StoreUnavailableError as error:
        logger.warning("It is not known whether the run of task %s counts; it is taken to count: %s", run.key[0], error)
        run.has_waited = True
        return True


def end(runtime: Runtime, run: Run) -> None:
    """Remove the row of a run that ended well and keep its follow-ups, in one commit; then publish them.

    A run that was called lost because its worker was silent takes itself back: it leaves the dead set, or does not run
    again. Raises LeaseLostError if another run has the row or has had it since: then no follow-up of this one is
    published.

    Tries for a lease if the store is unavailable. Then StoreUnavailableError is raised, and this process keeps trying
    beside its other work. By then the worker may have called the run lost, as happens if this process dies.
    """
    try:
        _end(runtime, run, lambda once: patiently(runtime, once) if not run.has_waited else once())
    except StoreUnavailableError:
        _late_ends(runtime).add([run])
        raise


def end_late(runtime: Runtime, run: Run) -> None:
    """Have the row of a run without a lock removed soon: it ended well, and nothing follows it."""
    deferred_locks.of(runtime).end(run)


# --------------------------------------------------------------------------------------------------------------------


def _late_ends(runtime: Runtime) -> WriteBehind[Run]:
    return runtime.connections.write_behind(
        "ends",
        lambda: WriteBehind(
            "ends of tasks", partial(_end_late, runtime), within_s=LATE_END_S, patience_s=LATE_END_PATIENCE_S
        ),
    )


def _end_late(runtime: Runtime, runs: Sequence[Run]) -> None:
    claimed: ClaimedElsewhereError | None = None
    for run in runs:
        if run.has_ended:
            continue  # another end has just found the store unavailable again
        try:
            _end(runtime, run, lambda once: once())
        except LeaseLostError as error:
            logger.warning("%s", error)
        except ClaimedElsewhereError as error:
            claimed = error
            continue
        except StoreUnavailableError:
            raise
        except Exception:  # it must not keep the others from their ends; the worker finds the runs it still holds
            logger.exception("The end of task %s cannot be written", run.key[0])
        run.has_ended = True
    if claimed is not None:
        raise claimed


def _end(runtime: Runtime, run: Run, try_: Callable[[Callable[[], bool]], bool]) -> None:  # noqa: PLR0915 - its inner functions count too
    due: list[Message] = []
    since = 0.0

    def remove(executor: Transaction) -> bool:
        ended = end_task_runs(executor, holds.remove(run.key, worker_id=run.worker_id))
        return finish(executor, bool(ended))

    def take_back(executor: Transaction) -> bool:
        age_s = None if run.late is None else time.monotonic() - run.late.began_at
        return finish(executor, latecomers.take_back(executor, run.key, run.content, age_s=age_s))

    def finish(executor: Transaction, ended: bool) -> bool:
        nonlocal since
        due.clear()
        since = time.monotonic()
        if not ended:
            return False
        for message in run.follows:
            kept = tasks.keep(executor.run, message, waits_of(runtime))
            if kept is not None and not kept.waits:
                due.append(message)
        return True

    def once(work: Callable[[Transaction], bool]) -> bool:
        if run.claim is not None and not run.claim.hold():
            run.follows = [message for message in run.follows if message not in run.claim.messages]
            run.claim = None
        try:
            return runtime.connections.transact(
                "durable-end", work, single=not run.follows, within_s=patience_s(runtime)
            )
        except OutcomeUnknown:
            run.end_is_unknown = True
            raise

    reach("durable-end:before")
    # If a run without a lock was refused, another run of the same worker may hold the row.
    if not has_lock(runtime, run) or not try_(lambda: once(remove)):
        if not run.is_revoked and try_(lambda: once(take_back)):
            tell(runtime, TaskEndedWell(run.key[0], run.task))
        elif not run.end_is_unknown:
            raise lease_lost(run)
    reach("durable-end:after")
    if run.claim is not None:
        run.claim.settle()
    send(runtime, due, since=since)

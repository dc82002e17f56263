"""The end of a durable task's run: its row becomes another message, or is removed when its follow-ups are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...model.crash_points import reach
from ...model.durable import Content, Key, Message
from ...model.errors import LeaseLostError, StoreUnavailableError
from ...model.events import TaskEndedWell
from ...model.logger import logger
from ...model.protocols import Rider
from ...store import results
from ...store.errors import OutcomeUnknown
from ...store.outbox import burials, holds, tasks
from ...store.outbox.arming import end_task_runs
from ...store.outbox.tasks import Kept
from ...store.statement import Transaction
from ...store.write_behind import WriteBehind
from ..after_commit import publish_kept, result_of, tell
from ..gates import capacity
from ..runtime import PAUSE_S, Runtime, patiently
from .durable_runs import Run, lease_lost

LATE_END_PATIENCE_S = 3600.0
"""Seconds for which a process keeps trying to write ends that were given up."""
LATE_END_S = 0.5
"""Seconds between two tries to write ends that were given up."""


def go_on(runtime: Runtime, run: Run, message: Message, *, enters_pool: bool = False) -> None:
    """Turn the row of a run into the row of its next message, and publish that message when it is due.

    With `enters_pool` the message leaves the pool of the run, if any, and waits for its own slots.

    Tries for a lease if the store is unavailable, because Celery treats a retry that cannot be sent as a failure.
    Raises LeaseLostError if the row was taken from this run.
    """
    is_unknown = False

    def work(executor: Transaction) -> Kept | None:
        end = tasks.move(message, run.key, runtime.settings, worker_id=run.worker_id, enters_pool=enters_pool)
        found = end_task_runs(executor, end)
        return Kept(found[0].waits, found[0].generation) if found else None

    def once() -> Kept | None:
        nonlocal is_unknown
        try:
            return runtime.connections.transact("durable-move", work, single=True, within_s=runtime.patience_s)
        except OutcomeUnknown:
            is_unknown = True
            raise

    kept = patiently(runtime, once) or (_moved_before(runtime, run) if is_unknown else None)
    if kept is None:
        raise lease_lost(run)
    run.moved = True
    if not kept.waits:
        publish_kept(runtime, [replace(message, generation=kept.generation)])
    if enters_pool and message.admission is not None:
        capacity.ring(runtime, [message.admission.pool.name])


def counts(runtime: Runtime, run: Run, *, ended_well: bool) -> bool:
    """Tell whether a run counts, before its outcome is reported: it does not if its row was taken from it.

    A run that was declared lost and ended well counts if no other run has begun since. From here on no other begins: if
    the process dies before `end`, the row is buried as lost. Tries for a lease if the store is unavailable; then the
    run counts, because nothing is known against it.
    """
    if run.is_revoked:
        return False

    def keep_from_others(executor: Transaction) -> bool:
        return burials.keep_from_others(
            executor, run.key, run.content, for_s=runtime.settings.lease, entry_too=not run.is_counted
        )

    def ask(name: str, work: Callable[[Transaction], bool]) -> bool:
        return runtime.connections.transact(name, work, single=True, within_s=runtime.patience_s)

    def once() -> bool:
        hold = partial(holds.holds, key=run.key, worker_id=run.worker_id)
        return ask("durable-holds", hold) or (ended_well and ask("durable-keep-from-others", keep_from_others))

    try:
        return patiently(runtime, once)
    except StoreUnavailableError as error:
        logger.warning("It is not known whether the run of task %s counts; it is taken to count: %s", run.key[0], error)
        run.has_waited = True
        return True


def end(runtime: Runtime, run: Run) -> None:
    """Remove the row of a run that ended well, keep its follow-ups and its result in the store, all in one commit.

    Then the follow-ups are published.

    If the run was declared lost because its worker was silent, this is revoked: its row leaves the dead set, or does
    not run again. Raises LeaseLostError if another run has the row or has had it since: then no follow-up of this run
    is published.

    Tries for a lease if the store or the result backend is unreachable, or if another process has the right to publish
    the run's chord. After that it gives the result up, and this process keeps trying the rest beside its other work;
    raises StoreUnavailableError if the store is unreachable. By then the worker may have declared the run lost, as it
    does if this process dies.
    """
    try:
        has_ended = _end(runtime, run, patient=not run.has_waited)
    except StoreUnavailableError:
        _late_ends(runtime).add([run])
        raise
    if not has_ended:
        logger.warning("Task %s ends later: nobody has published the body of its chord yet", run.key[0])
        _late_ends(runtime).add([run])


def end_held(runtime: Runtime, over: results.Ended, content: Content, *, is_unknown: bool) -> None:
    """Remove the row of a run that ended well without follow-ups, if its worker could not remove it with others.

    The result is kept with that.
    Either a transaction has locked the row, or the run was declared lost, which is then revoked. `is_unknown`: an end
    whose answer was lost may have been applied.
    """
    held, result = over
    key = (held.task_id, held.generation)

    def work(executor: Transaction) -> str | None:
        how = None
        if end_task_runs(executor, holds.remove(key, worker_id=held.worker_id, at=held.at)):
            how = "ended"
        elif burials.take_back(executor, key, content):
            how = "taken back"
        if how is not None and result is not None and results.keep(executor, result):
            results.tell(executor, [result.key])
        return how

    done = runtime.connections.transact("durable-end", work, within_s=runtime.patience_s)
    if done == "taken back":
        tell(runtime, TaskEndedWell(held.task_id, content.task))
    elif done is None and (not is_unknown or _is_kept(runtime, key)):
        logger.warning("Task %s has ended well, and does not count: it was taken from its run before.", held.task_id)


# --------------------------------------------------------------------------------------------------------------------


def _moved_before(runtime: Runtime, run: Run) -> Kept | None:
    """Return how the next message of a run is kept, if a try whose answer was lost has kept it."""
    row = tasks.read(runtime.connections, run.key[0])
    if row is None or row.generation != run.key[1] + 1:
        return None
    return Kept(waits=not row.unpublished, generation=row.generation)


def _is_kept(runtime: Runtime, key: Key) -> bool:
    """Tell whether the row exists, for another run or in the dead set: then no end of this run has removed it.

    The follow-ups of this run are not kept then, and the backend must not forget a chord whose body is among them.
    """
    return tasks.read(runtime.connections, key[0]) is not None or burials.buried(runtime.connections, key) is not None


def _late_ends(runtime: Runtime) -> WriteBehind[Run]:
    return runtime.connections.write_behind(
        "ends",
        lambda: WriteBehind(
            "ends of tasks", partial(_end_late, runtime), within_s=LATE_END_S, patience_s=LATE_END_PATIENCE_S
        ),
    )


def _end_late(runtime: Runtime, runs: Sequence[Run]) -> list[Run]:
    """Write ends; return the runs whose chord another process may still publish."""
    for run in runs:
        if run.has_ended:
            continue  # another end has just found the store unavailable again
        try:
            run.has_ended = _end(runtime, run, patient=False)
        except LeaseLostError as error:
            logger.warning("%s", error)
            run.has_ended = True
        except StoreUnavailableError:
            raise
        except Exception:  # it must not keep the others from their ends; the worker finds the runs that it still holds
            logger.exception("The end of task %s cannot be written", run.key[0])
            run.has_ended = True
    return [run for run in runs if not run.has_ended]


def _may_end(run: Run, *, wait_s: float) -> bool:
    """Report the outcome, and keep the right to publish a chord's body; False if this is impossible for `wait_s`.

    A result for which no chord waits is given up then: the task has ended well all the same. A part of a chord that is
    not counted waits on: no other process knows that it has ended well.
    """
    began = time.monotonic()
    while not (_is_told(run) and _has_claim(run)):
        untold, waited_s = run.untold, time.monotonic() - began
        is_uncounted = untold is not None and untold.is_part and not untold.is_told
        if waited_s < (LATE_END_PATIENCE_S if wait_s and is_uncounted else wait_s):
            time.sleep(PAUSE_S)
        elif untold is None or untold.is_part:
            return False
        else:
            logger.error("The result of task %s is not stored: its backend was away for too long", run.key[0])
            run.untold = None
    return True


def _is_told(run: Run) -> bool:
    if run.untold is not None and run.untold.tell():
        run.untold = None
    return run.untold is None


def _has_claim(run: Run) -> bool:
    """Extend the right to publish a chord's body; False while another process has it.

    If that process has published the body, the body no longer follows this run.
    """
    held = True if run.claim is None else run.claim.hold()
    if held is False and run.claim is not None:
        run.follows = [message for message in run.follows if message not in run.claim.messages]
        run.claim = None
    return held is not None


class _End:
    """The commit that ends a run: its row goes, or the loss is revoked; its follow-ups and its result are kept."""

    def __init__(self, runtime: Runtime, run: Run, *, patient: bool) -> None:
        self._runtime = runtime
        self._run = run
        self._patient = patient
        self._keeps = result_of(run.riders)
        self.due: list[Message] = []
        """The follow-ups that are to be published now."""

    def remove(self) -> bool | None:
        """Remove the row; False if the run has it no longer, None while another process may publish its chord."""
        run, keeps = self._run, self._keeps

        def work(executor: Transaction) -> bool:
            ended = end_task_runs(executor, holds.remove(run.key, worker_id=run.worker_id, keeps=keeps))
            if ended and keeps is not None:
                run.riders[0].kept(is_listened=ended[0].listened)
            return self._finish(executor, bool(ended), riders)

        riders = run.riders if keeps is None else ()
        return self._try(work, riders)

    def take_back(self) -> bool | None:
        """Revoke the loss of the run; False if another run has had the row since, None as in `remove`."""
        run = self._run

        def work(executor: Transaction) -> bool:
            taken = burials.take_back(executor, run.key, run.content, entry_too=not run.is_counted)
            return self._finish(executor, taken, run.riders)

        return self._try(work, run.riders)

    def _finish(self, executor: Transaction, ended: bool, riders: Sequence[Rider]) -> bool:
        self.due = []
        if not ended:
            return False
        for message in self._run.follows:
            kept = tasks.keep(executor, message, self._runtime.settings)
            if kept is not None and not kept.waits:
                self.due.append(message)
        for rider in riders:
            rider.write(executor)
        return True

    def _try(self, work: Callable[[Transaction], bool], riders: Sequence[Rider]) -> bool | None:
        runtime, run = self._runtime, self._run

        def once() -> bool | None:
            if not _may_end(run, wait_s=runtime.settings.lease if self._patient else 0.0):
                return None
            single = not run.follows and not riders
            try:
                return runtime.connections.transact("durable-end", work, single=single, within_s=runtime.patience_s)
            except OutcomeUnknown:
                run.end_is_unknown = True
                raise

        return patiently(runtime, once) if self._patient else once()


def _end(runtime: Runtime, run: Run, *, patient: bool) -> bool:
    """End a run; False while another process may publish its chord. With `patient` it tries for a lease."""
    end = _End(runtime, run, patient=patient)
    reach("durable-end:before")
    ended = end.remove()
    if ended is False and not run.is_revoked:
        ended = end.take_back()
        if ended:
            tell(runtime, TaskEndedWell(run.key[0], run.task))
    if ended is None:
        return False
    if not ended and (not run.end_is_unknown or _is_kept(runtime, run.key)):
        raise lease_lost(run)
    reach("durable-end:after")
    if run.claim is not None:
        run.claim.settle()
    publish_kept(runtime, end.due)
    for rider in run.riders:
        rider.committed()
    return True

"""Managed queues: pauses them, sets their limits, and reads their contents; begins the best owed run of a queue.

Runs that may not begin are kept at the gate, and let in later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.durable import Content, Key, Terms
from ...model.errors import StoreUnavailableError, job_not_found
from ...model.logger import logger
from ...model.messages import Doorbell
from ...model.queue import QueueSettings, without_pool
from ...store import jobs, permits, queues
from ...store.connection.connections import Connections, repeat
from ...store.outbox import publishing
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ...store.statement import Transaction
from .. import deduplication
from ..after_commit import dispatch, publish_and_mark
from ..runtime import Runtime


def pause(runtime: Runtime, name: str, reason: str | None) -> None:
    """Let no further run of a queue begin, anywhere; runs in progress go on.

    Each store has its own queues, because any store may keep durable tasks.
    """
    for there in runtime.in_each_store():
        pause = partial(queues.pause, name=name, reason=reason)
        repeat(partial(there.connections.transact, "pause-queue", pause, single=True))
        rank(there, name)


def resume(runtime: Runtime, name: str) -> None:
    """Let runs of a queue begin again, and publish the first messages at its gate.

    If the process dies in between, the sweeper publishes them.
    """
    for there in runtime.in_each_store():
        rank(there, name)
        resume = partial(queues.resume, name=name)
        repeat(partial(there.connections.transact, "resume-queue", resume, single=True))
        let_in(there, name)


def unmanage(runtime: Runtime, name: str) -> bool:
    """Make a queue unmanaged, and tell whether it was managed; the sweeper publishes the messages at its gate.

    Later permits find no queue to lock: they put no message back to the gate, and begin the jobs that they name.
    """

    def work(executor: Transaction) -> bool:
        if not queues.unmanage(executor, name):
            return False
        permits.let_all_in(executor, name)
        return True

    was_managed = False
    for there in runtime.in_each_store():
        was_managed |= there.connections.transact("unmanage", work)
    return was_managed


def configure(runtime: Runtime, name: str, changes: Mapping[str, Any]) -> QueueSettings:
    """Change settings of a queue, and return all its settings. It is managed from now on."""
    where = f"queue {name!r}"
    QueueSettings().with_(where, changes)
    settings = QueueSettings()
    for there in runtime.in_each_store():

        def work(executor: Transaction) -> QueueSettings:
            found = queues.lock(executor, name)
            changed = found.settings.with_(where, changes)
            queues.set_(executor, name, changed, declared=None)
            return changed

        settings = there.connections.transact("configure-queue", work)
        rank(there, name)
        let_in(there, name)
    return settings


def apply_declared(runtime: Runtime, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Apply the changed declarations in a store; unchanged declarations keep changes made at run time.

    A queue is not managed if only its capacity pool is declared.
    """
    declared = {name: own for name, settings in declared.items() if (own := without_pool(settings))}
    known = queues.read(runtime.connections, declared) if declared else {}
    for name, settings in declared.items():
        if name not in known or known[name].declared != settings:
            _declare(runtime, name, settings)


def peek(runtime: Runtime, name: str, *, limit: int) -> Sequence[int]:
    """Return the ids of the jobs that are owed a run, in the order of service."""
    has_ranks = queues.is_managed(runtime.connections, name) and not queues.unranked(runtime.connections, name)
    return queues.peek(runtime.connections, name, limit=limit, has_ranks=has_ranks)


def set_priority(runtime: Runtime, job_id: int, priority: int) -> None:
    """Change the priority of a job, and of its waiting run; equal priorities keep their order."""

    def work(executor: Transaction) -> None:
        if job_id not in jobs.lock(executor, [job_id]):
            raise job_not_found(job_id)
        queues.set_priority(executor, job_id, priority)

    runtime.connections.transact("set-priority", work)


def rank(runtime: Runtime, name: str | None = None, *, must_stop: Callable[[], bool] = lambda: False) -> None:
    """Rank the messages that waited in a queue, or in any queue, before it was managed.

    If the process dies meanwhile, or `must_stop` is true, or a message is locked, the sweeper ranks the queue again.
    """
    for queue in queues.unranked(runtime.connections, name):
        after, goes_on, has_missed = 0, True, False
        while goes_on:
            page = runtime.connections.transact("rank", partial(queues.rank, name=queue, after=after), single=True)
            after, goes_on, has_missed = page.last, page.goes_on, has_missed or page.has_missed
            if goes_on and must_stop():
                return
        if not has_missed:
            runtime.connections.transact("rank", partial(queues.has_ranked, name=queue), single=True)


def _declare(runtime: Runtime, name: str, declared: Mapping[str, Any]) -> None:
    def work(executor: Transaction) -> bool:
        found = queues.lock(executor, name)
        if found.declared == declared:  # another process was faster
            return False
        settings = QueueSettings().with_(f'sidejob_queues["{name}"]', declared)
        queues.set_(executor, name, settings, declared=declared)
        return True

    if runtime.connections.transact("configure-queue", work):
        logger.info("Queue %s has the settings that sidejob_queues declares: %s", name, dict(declared))
        rank(runtime, name)
        let_in(runtime, name)


# -- runs in managed queues --------------------------------------------------------------------------------------------


class AtGateError(Exception):
    """The gate of a managed queue is closed: the message of a durable task waits there."""


_known: weakref.WeakKeyDictionary[Connections, dict[str, bool]] = weakref.WeakKeyDictionary()
"""The managed queues that this process knows, and whether claims must lock each of them.

It only decides which statement is tried first.
"""


def is_known(runtime: Runtime, queue: str | None) -> bool:
    """Tell whether the queue was managed when this process last read it."""
    return queue in _known.get(runtime.connections, ())


def claim(  # noqa: PLR0913 - the delivery, and who has it
    runtime: Runtime, queue: str, *, job_id: int, task: str, tasks: Collection[str], worker_id: int, most: int
) -> tuple[Sequence[Any], bool] | None:
    """Begin the best run that is owed in a queue: (the rows of `claims.claim`, whether its end frees a slot).

    What the delivery names, and which `tasks` its process can run, is described at `store.permits.claim`.

    Without a run to begin there are no rows, and a waiting message stays at the gate. Returns None if the queue is not
    managed.

    If the process dies after the commit, or the answer is lost, the worker finds that it holds a run which it does not
    execute.
    """
    known = _known.setdefault(runtime.connections, {})
    begin: Callable[..., Sequence[Any]] = partial(
        permits.claim,
        queue=queue,
        job_id=job_id,
        task=task,
        tasks=tasks,
        worker_id=worker_id,
        most=most,
        schema=runtime.audience.to_ask,
    )
    if known.get(queue) is False and (found := runtime.connections.timed("claim", begin, single=True)):
        return found, False

    def work(executor: Transaction) -> tuple[Sequence[Any], Any]:
        locked = queues.lock_for_run(executor, queue)
        if locked is None:
            return (), None
        found = begin(executor, locked=locked)
        reach("permit:before-commit")
        if not found:
            permits.go_by(executor, queue, job_id=job_id)
        return found, locked

    found, locked = runtime.connections.timed("claim", work)
    if locked is None:
        known.pop(queue, None)
        return None
    known[queue] = locked.has_limit or locked.has_keys
    return found, known[queue]


def begin_task(
    runtime: Runtime, key: Key, content: Content, *, worker_id: int, terms: Terms
) -> tuple[Any | None, str | None, bool]:
    """Lock the row of a durable task in a managed queue: (begun, the queue whose slot its end frees, kept at the gate).

    `begun` is the row's (pool, queue, waited_s), None if the run may not begin.

    Nothing happens if the queue is not managed, or the row does not wait.
    """

    def work(executor: Transaction) -> tuple[Any | None, str | None, bool]:
        locked = queues.lock_for_task(executor, key)
        if locked is None:
            return None, None, False
        begun = permits.begin(executor, key, content, queue=locked.name, worker_id=worker_id, terms=terms)
        if begun is not None:
            return begun, locked.name if locked.has_limit else None, False
        return None, None, permits.wait(executor, key, content)

    return runtime.connections.transact("durable-begin", work)


def let_in(runtime: Runtime, queue: str | None = None) -> int:
    """Publish the messages at open gates, of one queue or of all, as far as limits and rates allow; returns how many.

    If this process dies or the broker does not answer, the sweeper publishes them.
    """
    let = 0
    for name, free in queues.free_places(runtime.connections, queue).items():
        take = partial(permits.let_in, queue=name, limit=free.number, by_keys=free.by_keys)
        let += _publish(runtime, runtime.connections.transact("let-in", take, single=True))
    return let


def freed(runtime: Runtime, queue: str | None) -> None:
    """Let the next run of a queue in, after the end of a run has freed a slot there; never raises for the store."""
    if queue is None:
        return
    runtime.after_commit(lambda: _let_one_in(runtime, queue))


def publish(runtime: Runtime, rows: Sequence[Any]) -> None:
    """Publish due messages of jobs and of durable tasks, unless another process does; rows are (task_id, job_id)."""
    jobs = _reserved(runtime, JOBS, [row.task_id for row in rows if row.job_id is not None])
    dispatch(runtime, [Doorbell.of_row(row) for row in jobs if row.job_id is not None])
    tasks = _reserved(runtime, TASKS, [row.task_id for row in rows if row.job_id is None])
    if tasks:
        publish_and_mark(runtime, deduplication.of_rows(runtime, [row for row in tasks if row.fate == "publish"]))


def _let_one_in(runtime: Runtime, queue: str) -> None:
    """Let one message in; the lock waits for permits that have found no slot and put a message back to the gate."""

    def work(executor: Transaction) -> Sequence[Any]:
        queues.lock_for_run(executor, queue)
        free = queues.free_places(executor, queue).get(queue)
        return () if free is None else permits.let_in(executor, queue, limit=1, by_keys=free.by_keys)

    try:
        _publish(runtime, runtime.connections.transact("let-in", work))
    except StoreUnavailableError as error:
        logger.warning("The sweeper lets the next run into queue %s: %s", queue, error)


def _publish(runtime: Runtime, rows: Sequence[Any]) -> int:
    reach("let-in:before-publish")
    publish(runtime, rows)
    return len(rows)


def _reserved(runtime: Runtime, kind: Kind, task_ids: Sequence[str]) -> Sequence[Any]:
    reserve = partial(publishing.reserve, kind=kind, task_ids=task_ids)
    return runtime.connections.transact("reserve", reserve, single=True) if task_ids else ()

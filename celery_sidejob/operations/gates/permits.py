"""Runs in managed queues: begins the best owed run, keeps runs that may not begin at the gate, and lets them in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from ...model.crash_points import reach
from ...model.durable import Content, Key, Terms
from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...model.messages import Doorbell
from ...store import permits, queues
from ...store.connection.connections import Connections
from ...store.outbox import publishing
from ...store.outbox.kinds import JOBS, TASKS, Kind
from ...store.statement import Transaction
from .. import deduplication
from ..after_commit import dispatch
from ..publishing import publish_and_mark
from ..runtime import Runtime


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


# --------------------------------------------------------------------------------------------------------------------


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

"""Pauses and resumes queues, sets their limits, and reads their contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...model.errors import job_not_found
from ...model.logger import logger
from ...model.queue import QueueSettings, without_pool
from ...store import jobs, queues
from ...store import permits as store_permits
from ...store.connection.connections import repeat
from ...store.statement import Transaction
from ..runtime import Runtime
from . import permits


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
        permits.let_in(there, name)


def unmanage(runtime: Runtime, name: str) -> bool:
    """Make a queue unmanaged, and tell whether it was managed; the sweeper publishes the messages at its gate.

    Later permits find no queue to lock: they put no message back to the gate, and begin the jobs that they name.
    """

    def work(executor: Transaction) -> bool:
        if not queues.unmanage(executor, name):
            return False
        store_permits.let_all_in(executor, name)
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
        permits.let_in(there, name)
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


# --------------------------------------------------------------------------------------------------------------------


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
        permits.let_in(runtime, name)

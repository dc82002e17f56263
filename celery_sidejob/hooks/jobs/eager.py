"""Runs in the process that asks for them: in eager mode, and in tests.

In eager mode a job runs with all jobs that its runs ask to run, until all rest: its children, its parent, and any other
job that is woken by a packet, on a channel, by `run()`. As in Celery, eager mode never waits: a retry comes at once,
and timers stay in the store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery, states
from celery.app.task import Context
from celery.app.trace import trace_task
from celery.exceptions import Ignore, NotRegistered, Retry
from celery.result import EagerResult
from kombu.utils.uuid import uuid

from ...jobs.job import Job, enqueue
from ...model import native
from ...model.crash_points import Died
from ...model.durable import DIGEST, WORKER, Digest, Message
from ...model.status import Status
from ...operations.changes import batches
from ...operations.runs import runs
from ...operations.runtime import Runtime
from ...services.heartbeat.heartbeat import Heartbeat
from ...services.loop import Loop
from ...store.outbox import doorbells
from ..bodies import Outcome
from ..broker.publishing import INLINE
from ..messages.kept_message import decoded, delivered
from ..tasks.durable_run import Copy
from .run import run_claimed

if TYPE_CHECKING:
    from .sidejob_task import SideJobTask

DIED: list[str] = []
"""The names of this process's workers that a test has let "die"; their rows say that they are alive."""


def apply_eagerly(task: SideJobTask, runtime: Runtime, args: Any, kwargs: Any, options: dict[str, Any]) -> EagerResult:
    """Run one job to its rest, and return its result with the job as ``.job``.

    A job that is made in the caller's transaction is PENDING: it cannot run before the commit, which then runs it.
    """
    for name in ("producer", "publisher", "throw", "task_type", "retries", "eta", "countdown"):
        options.pop(name, None)
    task_id = options.pop("task_id", None) or uuid()
    if options.get("transaction") is not None:
        made = enqueue(runtime, task, tuple(args), kwargs, task_id=task_id, **options)
        return _result(task, task_id, made, None, states.PENDING)
    asked_for: set[int] = set()
    with native.within(INLINE, asked_for):
        job = enqueue(runtime, task, tuple(args), kwargs, task_id=task_id, **options)
        outcomes = _run_all(task.app.sidejob, asked_for)
    job.refresh()
    state = {Status.COMPLETED: states.SUCCESS, Status.FAILED: states.FAILURE, Status.TERMINATED: states.REVOKED}
    shown = state.get(job.status, job.status.upper())
    value = outcomes.get(job.id) if job.status in (Status.COMPLETED, Status.FAILED) else None
    result = _result(task, task_id, job, value, shown)
    if task.app.conf.task_eager_propagates and isinstance(value, BaseException):
        raise value
    return result


def _result(task: SideJobTask, task_id: str, job: Job, value: Any, state: str) -> EagerResult:
    result = EagerResult(task_id, value, state, name=task.name)
    result.job = job
    return result


def run_here(sidejob: Any, job_ids: set[int]) -> None:
    """Run jobs that were just asked to run, and all jobs that they ask, instead of notifying a worker."""
    with native.within(INLINE, job_ids):
        _run_all(sidejob, job_ids)


def _run_all(sidejob: Any, asked_for: set[int]) -> dict[int, Any]:
    """Run the jobs in `asked_for`, into which their runs put more, until it stays empty.

    Returns the value or the error of each job's body, by the job's id.
    """
    runtime = sidejob.runtime
    outcomes: dict[int, Any] = {}
    with worker_here(runtime) as worker:
        while asked_for:
            batch = set(asked_for)
            asked_for.clear()
            for row in doorbells.waiting(runtime.connections, batch):
                outcome = run_owed(sidejob.app, worker, row, eager=True)
                if outcome is not None and not outcome.rests:
                    outcomes[row.job_id] = outcome.value if outcome.error is None else outcome.error
    return outcomes


@contextmanager
def worker_here(runtime: Runtime) -> Iterator[Heartbeat]:
    """Let this process be a worker in the store within the block; a test may let it die there."""
    heartbeat = Heartbeat(runtime)
    heartbeat.register()
    loop = Loop(heartbeat)
    loop.start()
    dies = False
    try:
        yield heartbeat
    except Died:
        dies = True  # it keeps its runs: other workers find and rescue them
        DIED.append(heartbeat.ident)
        raise
    finally:
        if not dies:
            heartbeat.leave()
        loop.stop()


def run_owed(app: Celery, worker: Heartbeat, row: Any, *, eager: bool) -> Outcome | None:
    """Do the run that is owed by a doorbell's row; None if it is no longer owed. An `eager` retry does not wait."""
    try:
        task, runs_here = app.tasks[row.task], worker.runs
    except NotRegistered as error:  # woken by a client of other tasks
        return Outcome(error=error)
    # Otherwise the worker would give back a run longer than its lease, and keep a run that does not renew its own.
    delivery = runs_here.received((row.job_id, row.for_run), getattr(task, "lease", None))
    runs_here.accepted(delivery, os.getpid())
    try:
        runtime = worker.runtime
        hold = runs.claim(
            runtime, row.job_id, task=row.task, for_run=row.for_run, worker_id=worker.worker_id, passes=True
        )
        if hold is None:
            return None
        request = Context({"id": row.task_id, "is_eager": eager, "called_directly": False})
        with batches.within(None):  # its jobs do not belong to a batch's block, even if it runs inside of one
            return Outcome(run_claimed(task, runtime, hold, request))
    except (Ignore, Retry):
        return Outcome(rests=True)
    except Exception as error:
        return Outcome(error=error)
    finally:
        runs_here.over(delivery)


def run_kept(app: Celery, worker: Heartbeat, message: Message) -> Outcome | None:
    """Run a kept message like a pool's process, by Celery's own tracer; its end is written as usual.

    None if the gate of its queue was closed, or another run has it.
    """
    given = delivered(message)
    headers, properties = given["headers"], given["properties"]
    args, kwargs, embed = decoded(app, given["body"], headers, given["content-type"], given["content-encoding"])
    request: dict[str, Any] = {
        **headers,
        **embed,
        "args": args,
        "kwargs": kwargs,
        "is_eager": False,
        "called_directly": False,
        "delivery_info": properties["delivery_info"],
        "correlation_id": properties.get("correlation_id"),
        "reply_to": properties.get("reply_to"),
        "hostname": socket.gethostname(),
        WORKER: [(0, worker.worker_id)],
        DIGEST: Digest(message.content.digest),
    }
    key = (message.task_id, message.generation)
    delivery = worker.tasks.runs.received(key)  # otherwise the worker gives back a run longer than its lease
    try:
        traced = trace_task(app.tasks[message.task], message.task_id, args, kwargs, request, app=app)
    finally:
        worker.tasks.runs.over(delivery)
    if traced.info is None:
        return Outcome(traced.retval)
    error = traced.info.retval
    if isinstance(error, Copy):
        return None
    return Outcome(error=error) if traced.info.state == states.FAILURE else Outcome(rests=True)

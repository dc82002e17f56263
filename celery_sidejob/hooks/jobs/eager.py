"""Eager mode: a job is run in the process that asks for it, with all that its runs ask for, until that is quiet.

That is its children, its parent, and whatever other job is woken: by a packet, on a channel, by `run()`. As in Celery,
nothing is waited for: a retry comes at once, and what is set for later stays in the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, Retry
from celery.result import EagerResult
from kombu.utils.uuid import uuid

from ...jobs.job import Job, enqueue
from ...model.status import Status
from ...operations import runs
from ...services.heartbeat.heartbeat import Heartbeat
from ...services.loop import Loop
from ...store.outbox import doorbells
from ..broker.publishing import INLINE
from .run import run_claimed

if TYPE_CHECKING:
    from .sidejob_task import SideJobTask


def apply_eagerly(task: SideJobTask, args: Any, kwargs: Any, options: dict[str, Any]) -> EagerResult:
    """Run one job to its rest, and return its result with the job as ``.job``.

    One that is made in the caller's transaction cannot run before the commit, which then runs it: it is PENDING.
    """
    runtime = task._runtime
    for name in ("producer", "publisher", "throw", "task_type", "retries", "eta", "countdown"):
        options.pop(name, None)
    task_id = options.pop("task_id", None) or uuid()
    if options.get("transaction") is not None:
        made = enqueue(runtime, task, tuple(args), kwargs, task_id=task_id, **options)
        return _result(task, task_id, made, None, states.PENDING)
    asked_for: set[int] = set()
    inline = INLINE.set(asked_for)
    try:
        job = enqueue(runtime, task, tuple(args), kwargs, task_id=task_id, **options)
        returned, raised = _run_all(task.app.sidejob, asked_for)
    finally:
        INLINE.reset(inline)
    job.refresh()
    state = {Status.COMPLETED: states.SUCCESS, Status.FAILED: states.FAILURE, Status.TERMINATED: states.REVOKED}
    shown = state.get(job.status, job.status.upper())
    value: Any = None
    if job.status == Status.COMPLETED:
        value = returned.get(job.id)
    elif job.status == Status.FAILED:
        value = raised.get(job.id)
    result = _result(task, task_id, job, value, shown)
    if task.app.conf.task_eager_propagates and isinstance(value, BaseException):
        raise value
    return result


def _result(task: SideJobTask, task_id: str, job: Job, value: Any, state: str) -> EagerResult:
    result = EagerResult(task_id, value, state, name=task.name)
    result.job = job
    return result


def run_here(sidejob: Any, job_ids: set[int]) -> None:
    """Run jobs that were just asked for, and all that they ask for, instead of telling a worker of them."""
    inline = INLINE.set(job_ids)
    try:
        _run_all(sidejob, job_ids)
    finally:
        INLINE.reset(inline)


def _run_all(sidejob: Any, asked_for: set[int]) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """Run the jobs in `asked_for`, into which their runs put more, until it stays empty.

    Returns what bodies returned and raised, by job.
    """
    runtime = sidejob.runtime
    heartbeat = Heartbeat(runtime)
    heartbeat.register()
    loop = Loop(heartbeat)
    loop.start()
    returned: dict[int, Any] = {}
    raised: dict[int, BaseException] = {}
    try:
        while asked_for:
            batch = set(asked_for)
            asked_for.clear()
            for row in doorbells.waiting(runtime.connections, batch):
                _run_one(sidejob, runtime, heartbeat, row, returned, raised)
    finally:
        heartbeat.leave()
        loop.stop()
    return returned, raised


def _run_one(
    sidejob: Any, runtime: Any, heartbeat: Heartbeat, row: Any, returned: dict[int, Any],
    raised: dict[int, BaseException],
) -> None:  # fmt: skip
    hold = runs.claim(runtime, row.job_id, task=row.task, for_run=row.for_run, worker_id=heartbeat.worker_id)
    if hold is None:
        return
    task = sidejob.app.tasks[row.task]
    request = Context({"id": row.task_id, "is_eager": True, "called_directly": False})
    try:
        returned[row.job_id] = run_claimed(task, runtime, hold, request)
    except (Ignore, Retry):
        pass
    except Exception as error:
        raised[row.job_id] = error

"""Eager mode: a job is made in the configured store and run here, with its children and wakes, until all is quiet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, Retry
from celery.result import EagerResult
from kombu.utils.uuid import uuid

from ..job import Job, enqueue
from ..model.status import Status
from ..operations import runs
from ..operations.unit_of_work import apply_noted_asks
from ..services.heartbeat import Heartbeat
from ..services.loop import Loop
from ..store import jobs, messages
from .publishing import INLINE
from .run import run_claimed

if TYPE_CHECKING:
    from .task import SideJobTask

QUIET_S = 30.0
"""How long an eager call waits for what is due later (a retry's backoff, a timer of seconds)."""


def apply_eagerly(task: SideJobTask, args: Any, kwargs: Any, options: dict[str, Any]) -> EagerResult:
    """Run one job to its rest, and return its result with the job as ``.job``."""
    runtime = task._runtime
    for name in ("producer", "publisher", "throw", "task_type", "retries"):
        options.pop(name, None)
    task_id = options.pop("task_id", None) or uuid()
    inline = INLINE.set(True)
    try:
        job = enqueue(runtime, task, tuple(args), kwargs, task_id=task_id, **options)
        returned, raised = drain(task.app.sidejob, job)
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
    result = EagerResult(task_id, value, shown, name=task.name)
    result.job = job
    if task.app.conf.task_eager_propagates and isinstance(value, BaseException):
        raise value
    return result


def drain(sidejob: Any, job: Job) -> tuple[dict[int, Any], dict[int, BaseException]]:
    """Run what is due of the job's family until all of it is quiet; returns what bodies returned and raised, by job."""
    runtime = sidejob.runtime
    heartbeat = Heartbeat(runtime)
    heartbeat.register()
    loop = Loop(heartbeat)
    loop.start()
    returned: dict[int, Any] = {}
    raised: dict[int, BaseException] = {}
    deadline = time.monotonic() + QUIET_S
    try:
        while time.monotonic() < deadline:
            family = [row.id for row in jobs.subtree(runtime.connections, [job.id])]
            due = messages.waiting(runtime.connections, family)
            if not due:
                if not messages.pending(runtime.connections, family):
                    break
                apply_noted_asks(runtime, family)
                time.sleep(0.02)
                continue
            for row in due:
                _run_one(sidejob, runtime, heartbeat, row, returned, raised)
    finally:
        heartbeat.leave()
        loop.stop()
    return returned, raised


def _run_one(
    sidejob: Any, runtime: Any, heartbeat: Heartbeat, row: Any, returned: dict[int, Any],
    raised: dict[int, BaseException],
) -> None:  # fmt: skip
    hold = runs.claim(runtime, row.job_id, for_run=row.for_run, worker_id=heartbeat.worker_id)
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

"""The beginning of a run of a job in its process: a delivery claims the run that it names, or becomes a job.

In a managed queue a delivery is a permit: it may run another job than the job it names.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from ...jobs.job import enqueue, find_by_task_id
from ...model.durable import HELD, WORKER
from ...model.errors import InvalidValueError, SchemaError, StoreUnavailableError
from ...model.logger import logger
from ...model.messages import is_readable
from ...operations.runs import run_pages, runs
from ...operations.runs.run_pages import RunKey
from ...operations.runtime import Runtime
from ...store import claims
from ..broker.connection import PAUSE_S
from ..messages.doorbell import HEADER
from ..worker import own_process, pool_process, recording
from ..worker.received import OF_THE_PARENT
from .run import TaskBody, run_claimed


def run_delivery(task: TaskBody, runtime: Runtime, request: Context) -> Any:
    """Run the job that a delivery names, if its run is still owed, and return the body's value.

    Raises Celery's `Ignore` if there is nothing to report: for a stale delivery, a suspended or a refused run.
    """
    header = request.get(HEADER)
    if not is_readable(header):
        # The store knows what is owed: the message is published again when it has been silent for a while.
        logger.warning("A message for a job is of format %s, which this version does not read", header["v"])
        raise Ignore("a message of a newer format is left to newer workers")
    recording.begin(task.app)
    worker_id = request.get(WORKER)
    if worker_id is None:
        raise Ignore(f"job {header['job']}: this worker has no identity in the store yet; the sweeper sends it again")
    claimed: run_pages.Claimed | None = request.get(HELD)
    for ours in OF_THE_PARENT:  # a body may pass its headers on to the tasks that it calls
        (request.headers or {}).pop(ours, None)
    hold = (
        run_pages.begin(runtime, claimed)
        if claimed is not None
        else runs.claim(
            runtime,
            header["job"],
            task=request.task,
            for_run=header["for_run"],
            worker_id=worker_id,
            queue=runtime.tasks.delivered_from(request.delivery_info or {}),
            tasks=partial(like, task, request),
        )
    )
    if hold is None:
        _tell_if_forged(runtime, header["job"], request.task)
        raise Ignore(f"job {header['job']}: stale delivery for run {header['for_run']}")
    with turned(task.app, (header["job"], header["for_run"]), (hold.job_id, hold.run_no)):
        return run_claimed(task.app.tasks[hold.row.task], runtime, hold, request)


def _tell_if_forged(runtime: Runtime, job_id: int, task: str) -> None:
    """Log a doorbell for a job of another task: it is forged, or from a schema in which this id was another job's."""
    row = None
    with suppress(StoreUnavailableError):
        row = claims.outcome(runtime.connections, job_id)
    if row is not None and row.task != task:
        logger.error(
            "A message for job %d is rejected: it names the task %s, and the job's is %s",
            job_id,
            task,
            row.task,
            extra={"job_id": job_id, "task": row.task},
        )


def adopt_delivery(task: TaskBody, runtime: Runtime, request: Context, args: Any, kwargs: Any) -> Any:
    """Make a job of a message that a client without this package published for a sidejob task.

    The message's task id becomes the asking's, so that a second delivery makes no second job. Until then only the
    message exists: `JobRequest` acknowledges it after this, and without a store it goes back to the broker.
    """
    try:
        _adopt(task, runtime, request, args, kwargs)
    except (StoreUnavailableError, SchemaError, SoftTimeLimitExceeded) as error:  # the limit is meant for the body
        pause_s = random.uniform(*PAUSE_S)  # otherwise it would come and go without end
        logger.warning("Message %s cannot become a job and goes back to the broker: %s", request.id, error)
        time.sleep(pause_s)
        raise Reject(error, requeue=True) from None
    raise Ignore(f"task {request.id} is a job now")


def _adopt(task: TaskBody, runtime: Runtime, request: Context, args: Any, kwargs: Any) -> None:
    if find_by_task_id(runtime, request.id) is None:
        options = {
            "link": request.callbacks,
            "link_error": request.errbacks,
            "chain": request.chain,
            "chord": request.chord,
            "group_id": request.group,
            "group_index": request.group_index,
            "root_id": request.root_id,
            "parent_id": request.parent_id,
            "reply_to": request.reply_to,
            "shadow": request.shadow,
            "ignore_result": request.ignore_result or None,
        }
        options["time_limit"], options["soft_time_limit"] = request.timelimit or (None, None)
        given = {key: value for key, value in options.items() if value is not None}
        queue = runtime.tasks.delivered_from(request.delivery_info or {})
        try:
            enqueue(runtime, task, tuple(args), kwargs, queue=queue, task_id=request.id, **given)
        except InvalidValueError:
            if find_by_task_id(runtime, request.id) is None:  # otherwise the other delivery was faster
                raise


def like(task: Any, request: Context) -> Sequence[str]:
    """Return the sidejob tasks whose runs this delivery may begin: they have the time limits and lease of its task.

    Celery has set the limits before the run was chosen. A delivery with its own limits is only for the job that it
    names.
    """
    if any(request.timelimit or ()):
        return ()
    limits = _limits(task)
    return [
        name for name, other in task.app.tasks.items() if getattr(other, "sidejob", False) and _limits(other) == limits
    ]


@contextmanager
def turned(app: Celery, named: RunKey, run: RunKey) -> Iterator[None]:
    """Within the block the delivery of one run executes another; the worker's parent learns of it."""
    if run == named:
        yield
        return
    beside = own_process.runs_beside(app, named)
    if beside is not None:  # a thread, or a greenlet
        beside.turned(named, run)
        yield
        return
    pool_process.write_run(os.getpid(), run)
    try:
        yield
    finally:
        pool_process.write_run(os.getpid(), None)


def _limits(task: Any) -> tuple[Any, ...]:
    return task.time_limit, task.soft_time_limit, task.lease

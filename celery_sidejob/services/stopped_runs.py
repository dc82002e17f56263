"""Ends an asking from the worker's parent: its run was stopped by a time limit, or the asking was revoked."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ..model.errors import LeaseLostError
from ..model.status import RunEnd
from ..operations import endings, runs
from ..operations.hold import Hold
from ..operations.job_run_end import Ending
from ..operations.runtime import Runtime
from ..store import claims
from .heartbeat.deliveries import RunKey

logger = logging.getLogger("celery_sidejob")


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run is ended: the error that its asking fails with, and the reason in the dead set."""

    kind: str
    """The name of the error's class."""
    message: str
    reason: str = "failed"


def end_from_outside(runtime: Runtime, key: RunKey, task: str | None, stop: Stop, *, worker_id: int) -> bool:
    """End, as failed, a run that this worker holds; a run not claimed yet is claimed first.

    False if it ended by itself, runs elsewhere, or its job is of another `task` than the message says; None if no
    message names the run. Units that it committed stay. Whatever its process still tries to commit is refused.
    """
    job_id, run_no = key
    if task is None:
        held = claims.read_claimed(runtime.connections, job_id)
        if held is None:
            return False
        task = str(held.task)
    hold = runs.claim(runtime, job_id, task=task, for_run=run_no, worker_id=worker_id, passes=True)
    if hold is None:
        row = claims.read_claimed(runtime.connections, job_id)
        if row is None or (row.task, row.run_no, row.worker_id) != (task, run_no, worker_id):
            return False
        hold = Hold(job_id, run_no, row.worker_id, row.run_kind, row.unit_no, row.started, row=row)
    error = endings.error_json(stop.kind, stop.message, runtime.results.module_of(stop.kind))
    ending = Ending(RunEnd.FAILED, result=error, error=error, reason=stop.reason)
    if hold.kind == "shutdown":
        ending = Ending(RunEnd.TERMINATED, error=error)
    try:
        endings.end(runtime, hold, None, ending, from_outside=True)
    except LeaseLostError:
        logger.info("Run %d of job %d ended by itself just before it was stopped", run_no, job_id)
        return False
    return True

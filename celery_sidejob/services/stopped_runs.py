"""Ending an asking from the worker's parent: its run was stopped by a time limit, or it was revoked."""

from __future__ import annotations

import logging

from ..model.errors import LeaseLostError
from ..model.status import Status
from ..operations import endings, runs
from ..operations.endings import Ending
from ..operations.hold import Hold
from ..store import claims
from .heartbeat import Heartbeat
from .runs_here import Key

logger = logging.getLogger("celery_sidejob")

MODULES = {"TimeLimitExceeded": "billiard.exceptions", "TaskRevokedError": "celery_sidejob.hooks.revocation"}


def end_from_outside(heartbeat: Heartbeat, key: Key, kind: str, message: str, reason: str) -> None:
    """End the run as failed with an error of `kind`; one that was not claimed yet is claimed for that.

    Whatever units it committed stay; what its process still tries to commit is refused.
    """
    job_id, run_no = key
    runtime = heartbeat.runtime
    hold = runs.claim(runtime, job_id, for_run=run_no, worker_id=heartbeat.worker_id)
    if hold is None:
        row = claims.read_claimed(runtime.connections, job_id)
        if row is None or (row.run_no, row.worker_id) != (run_no, heartbeat.worker_id):
            return  # it ended by itself, or runs elsewhere
        hold = Hold(job_id, run_no, row.worker_id, row.run_kind, row.unit_no, row.started, row=row)
    error = endings.error_json(kind, message, MODULES[kind])
    ending = Ending(Status.FAILED, result=error, error=error, reason=reason)
    if hold.kind == "shutdown":
        ending = Ending(Status.TERMINATED)
    try:
        endings.end(runtime, hold, None, ending, from_outside=True)
    except LeaseLostError:
        logger.info("Run %d of job %d ended by itself just before it was stopped", run_no, job_id)

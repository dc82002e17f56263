"""Ends an asking from the worker's parent: its run was stopped by a time limit, or the asking was revoked."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.errors import LeaseLostError
from ..model.logger import logger
from ..model.status import RunEnd
from ..operations.hold import Hold
from ..operations.runs import endings, runs
from ..operations.runs.job_run_end import Ending
from ..operations.runs.run_pages import RunKey
from ..operations.runtime import Runtime
from ..store import claims


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run is ended: the error of its asking, and the reason in the dead set."""

    kind: str
    """The name of the error's class."""
    message: str
    reason: str = "failed"


def end_from_outside(runtime: Runtime, key: RunKey, task: str | None, stop: Stop, *, worker_id: int) -> bool:
    """End, as failed, a run that this worker holds; a run not claimed yet is claimed first.

    False if it ended by itself, runs elsewhere, or its job has another `task` than the message; `task` is None if no
    message names the run. Its committed units stay. Later commits of its process are refused.
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

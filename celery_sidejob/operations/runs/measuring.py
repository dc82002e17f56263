"""What a run tells of itself: its waits and durations, for the statistics, and its progress.

A wait is counted as it ends, and a duration too. Counts are in memory, and each process of a worker stores them from
time to time. If the process dies, its unstored counts are missing from the statistics.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...model.changes import KeepStep
from ...model.errors import StoreUnavailableError
from ...model.events import Measure, Measured, StepEnded, TaskFinished
from ...model.logger import logger
from ...model.status import RunEnd
from ...store import jobs
from ..hold import Hold
from ..ledger.durable_runs import Run
from ..runtime import Runtime

COUNTED = {RunEnd.FAILED: Measure.FAILURE, RunEnd.RETRIED: Measure.RETRY, RunEnd.LOST: Measure.LOSS}
"""The ends that are counted, beside the duration of the run."""
PROGRESS_S = 1.0
"""Seconds within which a run's progress is kept once at most; the last word is kept with its end."""


def begun(runtime: Runtime, hold: Hold) -> None:
    """Count how long a job's run has waited since it was due."""
    if hold.kind == "run":
        runtime.observer.tell(Measured(hold.row.queue, hold.row.task, Measure.WAIT, hold.row.waited_s))


def ended(hold: Hold, how: RunEnd, *, gives_up: bool) -> list[Measured]:
    """Return the counts of the end of a job's run, to be reported after its commit; none for a shutdown.

    Another process that ends the run or takes it back does not know its duration.
    `gives_up`: the job fails with this loss.
    """
    if hold.kind != "run":
        return []
    queue, task = hold.row.queue, hold.row.task
    found = [Measured(queue, task, COUNTED[how])] if how in COUNTED else []
    if gives_up:
        found.append(Measured(queue, task, Measure.FAILURE))
    if hold.began_at is not None:
        found.append(Measured(queue, task, Measure.RUN, time.monotonic() - hold.began_at))
    return found


def step_ended(runtime: Runtime, hold: Hold, record: KeepStep, how: RunEnd) -> None:
    """Count a step that this run has done or failed to do, and report it."""
    tell, task, queue = runtime.observer.tell, hold.row.task, hold.row.queue
    tell(Measured(queue, task, Measure.RUN, record.took_s, record.name))
    if how in COUNTED:
        tell(Measured(queue, task, COUNTED[how], step=record.name))
    tell(
        StepEnded(
            record.job_id,
            task,
            record.run_no,
            record.name,
            record.number,
            record.kind,
            record.took_s,
            record.tries,
            how,
        )
    )


def task_begun(run: Run) -> None:
    """Count how long a durable task's run has waited, if that is known."""
    if run.queue is not None and run.waited_s is not None:
        run.runtime.observer.tell(Measured(run.queue, run.task, Measure.WAIT, run.waited_s))


def task_ended(run: Run, how: RunEnd) -> None:
    """Count the end of a durable task's run, if the queue of the task is known."""
    if run.queue is None:
        return
    observer, lasted_s = run.runtime.observer, time.monotonic() - run.began_at
    observer.tell(Measured(run.queue, run.task, Measure.RUN, lasted_s))
    if how in COUNTED:
        observer.tell(Measured(run.queue, run.task, COUNTED[how]))
    if run.runtime.settings.task_history and not run.moved:
        observer.tell(TaskFinished(run.key[0], run.task, run.queue, how, lasted_s))


@dataclass(slots=True)
class Told:
    """What a run says of how far it is. It is no part of a unit: what is discarded was done all the same."""

    runtime: Runtime
    hold: Hold
    show: Callable[[str], object] | None = None
    """Shows it, as JSON text, to callers that wait for the result."""
    _pending: Mapping[str, Any] | None = None
    _written_at: float = float("-inf")

    def tell(self, done: float | None, total: float | None, note: str | None) -> None:
        """Keep this, now or with the next that is kept."""
        self._pending = {"done": done, "total": total, "note": note}
        if time.monotonic() - self._written_at >= PROGRESS_S:
            self.write()

    def write(self) -> None:
        """Keep what was said last; never raises for the store, because the work goes on without it."""
        told, self._pending, hold = self._pending, None, self.hold
        if told is None:
            return
        self._written_at = time.monotonic()
        work = partial(jobs.set_progress, job_id=hold.job_id, run_no=hold.run_no, worker_id=hold.worker_id, **told)
        try:
            self.runtime.connections.transact("progress", work, single=True)
        except StoreUnavailableError as error:
            logger.debug("The progress of job %d is not kept: %s", hold.job_id, error)
            return
        if self.show is not None:
            self.show(json.dumps({"current": told["done"], "total": told["total"], "note": told["note"]}))

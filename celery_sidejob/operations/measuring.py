"""What a run adds to the statistics: how long it has waited when it begins, and how long it ran when it ends.

It is counted in memory, and each process of a worker stores it from time to time. If the process dies, what it has not
stored is missing from the statistics.
"""

from __future__ import annotations

import time

from ..model.events import Measured, TaskFinished
from ..model.statistics import Measure
from ..model.status import RunEnd
from .durable_runs import Run
from .hold import Hold
from .runtime import Runtime

COUNTED = {RunEnd.FAILED: Measure.FAILURE, RunEnd.RETRIED: Measure.RETRY, RunEnd.LOST: Measure.LOSS}
"""The ends that are counted by themselves, beside the time that a run has taken."""


def begun(runtime: Runtime, hold: Hold) -> None:
    """Count how long a job's run has waited since it was due."""
    if hold.kind == "run":
        runtime.observer.tell(Measured(hold.row.queue, hold.row.task, Measure.WAIT, hold.row.waited_s))


def ended(hold: Hold, how: RunEnd, *, gives_up: bool) -> list[Measured]:
    """Return what the end of a job's run adds, to be told after its commit; nothing for a shutdown.

    Another process than the run's own, which takes a run back or ends it, does not know how long it has taken.
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


def task_begun(run: Run) -> None:
    """Count how long a durable task's run has waited, if its row has told that yet."""
    if run.queue is not None and run.waited_s is not None:
        run.runtime.observer.tell(Measured(run.queue, run.task, Measure.WAIT, run.waited_s))


def task_ended(run: Run, how: RunEnd) -> None:
    """Count the end of a durable task's run, if it is known in which queue the task was."""
    if run.queue is None:
        return
    observer, lasted_s = run.runtime.observer, time.monotonic() - run.began_at
    observer.tell(Measured(run.queue, run.task, Measure.RUN, lasted_s))
    if how in COUNTED:
        observer.tell(Measured(run.queue, run.task, COUNTED[how]))
    if run.runtime.settings.task_history and not run.moved:
        observer.tell(TaskFinished(run.key[0], run.task, run.queue, how, lasted_s))

"""The one place where runs of ordinary durable tasks end, whoever ends them: the run, its worker or the sweeper.

Code that belongs to every end goes into `end_task_runs`. It stands beside `end_job_run` and is not the same function: a
job's run ends under the job's lock, in a transaction of many statements, and the job's new status decides what follows.
A single statement ends a durable task's run, or a thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..store.statement import Transaction
from ..store.task_end import TaskEnd


def end_task_runs(executor: Transaction, end: TaskEnd) -> Sequence[Any]:
    """End runs, and return a row for each run that still had its row."""
    return executor.run(end.statement, **end.parameters)

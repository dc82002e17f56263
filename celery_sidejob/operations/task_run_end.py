"""The only code that ends runs of durable tasks, called by the run, its worker or the sweeper.

Code that belongs to every end goes into `end_task_runs`. It is a separate function from `end_job_run`. A job's run ends
under the job's lock, in a transaction of many statements, and the job's new status decides what follows. A single
statement ends a durable task's run, or a thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..store.outbox.arming import TaskEnd
from ..store.statement import Transaction


def end_task_runs(executor: Transaction, end: TaskEnd) -> Sequence[Any]:
    """End runs, and return a row for each run that still had its row."""
    return executor.run(end.statement, **end.parameters)

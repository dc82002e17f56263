"""The end of runs of durable tasks as a value, which only `operations/task_run_end.py` executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..model.status import RunEnd
from .statement import Statement

UNLOCKED = "locked_by = NULL, locked_at = NULL, locked_pid = NULL"
"""Assignments that free a row whose message stays after a run."""


class TaskEnd(NamedTuple):
    """How runs ended, and the statement that ends them: it unlocks or removes the rows that the runs hold."""

    how: RunEnd
    statement: Statement
    parameters: Mapping[str, Any]

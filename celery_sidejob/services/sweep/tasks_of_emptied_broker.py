"""Looks for the ordinary durable tasks that an emptied broker lost, and has them published again."""

from __future__ import annotations

from ...store.outbox.kinds import TASKS
from ..duty import Report
from .sweep import TaskDuty


class TasksOfEmptiedBroker(TaskDuty):
    """Looks for all tasks that no run holds, once `EmptiedBroker` has found the broker emptied, or new."""

    def is_due(self) -> bool:
        """Tell whether the broker was emptied, and answers."""
        return self._sweep.tasks_emptied and self._runtime.broker.ready and super().is_due()

    def _do(self, report: Report) -> None:
        self._sweep.tasks_emptied = not self._sweep.backlog.look_for_all(TASKS, "")

"""Takes ordinary durable tasks from workers that died; each task's `on_lost` decides whether it runs again."""

from __future__ import annotations

from ...operations import durable_locks
from ..duty import Count, Report
from .sweep import TaskDuty


class LostTasks(TaskDuty):
    """Takes all tasks that a dead worker holds."""

    counts = (Count("tasks_taken", "Ordinary durable tasks taken from workers that died."),)

    def _do(self, report: Report) -> None:
        report["tasks_taken"] += durable_locks.take_from_the_dead(self._runtime)

"""Signals in Celery's style, and the observer that sends them. A raising receiver stops nothing."""

from __future__ import annotations

import logging

from celery.utils.dispatch import Signal

from ..model.measures import Measures

logger = logging.getLogger("celery_sidejob")
events = logging.getLogger("celery_sidejob.events")
"""One line for each status change, with its facts as the record's attributes."""

job_status_changed = Signal(name="job_status_changed", providing_args={"job_id", "task", "before", "after"})
"""A job moved. Sent after the commit, by the process that made it; `before` is None for a new job."""

task_lost = Signal(name="task_lost", providing_args={"job_id", "task", "run_no"})
"""A run was lost with its worker. An ordinary durable task has `task_id`, and None for the others."""

task_recovered = Signal(name="task_recovered", providing_args={"job_id", "task", "run_no"})
"""A lost run was rescued: its job is queued again, with its inputs as they were.

For an ordinary durable task, with `task_id`: it was called lost, and has ended well after all.
"""

task_buried = Signal(name="task_buried", providing_args={"entry_id", "job_id", "task", "reason"})
"""A job was entered in the dead set, or (`job_id` is None, `task_id` given) an ordinary durable task."""


class SignalObserver:
    """Tells Celery signal receivers, and the log, what happened, and counts it."""

    def __init__(self, measures: Measures | None = None) -> None:
        self._measures = measures or Measures()

    def status_changed(
        self, job_id: int, task: str, before: str | None, after: str, run_no: int | None = None,
        task_id: str | None = None,
    ) -> None:  # fmt: skip
        """Send `job_status_changed`."""
        if events.isEnabledFor(logging.INFO):
            run = {name: value for name, value in (("run_no", run_no), ("task_id", task_id)) if value is not None}
            events.info(
                "Job %d (%s): %s -> %s", job_id, task, before or "new", after,
                extra={"job_id": job_id, "task": task, "before": before, "after": str(after), **run},
            )  # fmt: skip
        self._measures.count("status_changes", str(after))
        job_status_changed.send(sender=task, job_id=job_id, task=task, before=before, after=after)

    def buried(self, entry_id: int, job_id: int, task: str, reason: str) -> None:
        """Send `task_buried`."""
        # A failure was logged as an error by Celery already, and reported by whoever listens: one error, one report.
        level = logging.ERROR if reason in ("lost", "shutdown lost") else logging.WARNING
        logger.log(level, "Job %d (%s) was entered in the dead set: %s", job_id, task, reason)
        self._measures.count("jobs_buried", reason)
        task_buried.send(sender=task, entry_id=entry_id, job_id=job_id, task=task, reason=reason)

    def lost(self, job_id: int, task: str, run_no: int) -> None:
        """Send `task_lost`."""
        logger.warning("Run %d of job %d (%s) was lost with its worker", run_no, job_id, task)
        self._measures.count("runs_lost")
        task_lost.send(sender=task, job_id=job_id, task=task, run_no=run_no)

    def task_buried(self, entry_id: int | str, task_id: str, task: str, reason: str) -> None:
        """Send `task_buried` for an ordinary task."""
        logger.log(
            logging.ERROR if reason == "lost" else logging.WARNING,
            "Task %s (%s) was entered in the dead set: %s", task_id, task, reason,
            extra={"task_id": task_id, "task": task, "reason": reason},
        )  # fmt: skip
        self._measures.count("tasks_buried", reason)
        task_buried.send(sender=task, entry_id=entry_id, job_id=None, task_id=task_id, task=task, reason=reason)

    def task_lost(self, task_id: str, task: str) -> None:
        """Send `task_lost` for an ordinary task."""
        logger.warning("Task %s (%s) was lost with its worker", task_id, task, extra={"task_id": task_id, "task": task})
        self._measures.count("tasks_lost")
        task_lost.send(sender=task, job_id=None, task_id=task_id, task=task, run_no=None)

    def task_rescued(self, task_id: str, task: str) -> None:
        """Send `task_recovered` for an ordinary task that runs again."""
        task_recovered.send(sender=task, job_id=None, task_id=task_id, task=task, run_no=None)

    def task_recovered(self, task_id: str, task: str) -> None:
        """Send `task_recovered` for an ordinary task that has ended well after all."""
        logger.warning("Task %s (%s) was called lost while its worker was silent; it has ended well", task_id, task)
        self._measures.count("tasks_recovered")
        task_recovered.send(sender=task, job_id=None, task_id=task_id, task=task, run_no=None)

    def recovered(self, job_id: int, task: str, run_no: int) -> None:
        """Send `task_recovered`."""
        self._measures.count("runs_rescued")
        task_recovered.send(sender=task, job_id=job_id, task=task, run_no=run_no)

    def published(self, channel: str, message: str) -> None:
        """Nothing listens live yet; subscribed ports have the message already."""

    def counted(self, what: str, amount: int = 1) -> None:
        """Count it."""
        self._measures.count(what, amount=amount)

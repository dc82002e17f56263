"""Signals in Celery's style, and the observer that sends them. A raising receiver stops nothing."""

from __future__ import annotations

import logging

from celery.utils.dispatch import Signal

logger = logging.getLogger("celery_sidejob")

job_status_changed = Signal(name="job_status_changed", providing_args={"job_id", "task", "before", "after"})
"""A job moved. Sent after the commit, by the process that made it; `before` is None for a new job."""

task_lost = Signal(name="task_lost", providing_args={"job_id", "task", "run_no"})
"""A run was lost with its worker."""

task_recovered = Signal(name="task_recovered", providing_args={"job_id", "task", "run_no"})
"""A lost run was rescued: its job is queued again, with its inputs as they were."""

task_buried = Signal(name="task_buried", providing_args={"entry_id", "job_id", "task", "reason"})
"""A job was entered in the dead set."""


class SignalObserver:
    """Tells Celery signal receivers, and the log, what happened."""

    def status_changed(self, job_id: int, task: str, before: str | None, after: str) -> None:
        """Send `job_status_changed`."""
        logger.debug("Job %d (%s): %s -> %s", job_id, task, before, after)
        job_status_changed.send(sender=task, job_id=job_id, task=task, before=before, after=after)

    def buried(self, entry_id: int, job_id: int, task: str, reason: str) -> None:
        """Send `task_buried`."""
        logger.error("Job %d (%s) was entered in the dead set: %s", job_id, task, reason)
        task_buried.send(sender=task, entry_id=entry_id, job_id=job_id, task=task, reason=reason)

    def lost(self, job_id: int, task: str, run_no: int) -> None:
        """Send `task_lost`."""
        logger.warning("Run %d of job %d (%s) was lost with its worker", run_no, job_id, task)
        task_lost.send(sender=task, job_id=job_id, task=task, run_no=run_no)

    def recovered(self, job_id: int, task: str, run_no: int) -> None:
        """Send `task_recovered`."""
        task_recovered.send(sender=task, job_id=job_id, task=task, run_no=run_no)

    def published(self, channel: str, message: str) -> None:
        """Nothing listens live yet; subscribed ports have the message already."""

"""What the run of a kept message runs, for tests that begin runs by hand."""

from __future__ import annotations

from celery_sidejob.model.durable import Content
from celery_sidejob.operations.runtime import Runtime
from celery_sidejob.store.outbox import tasks

NOTHING = Content("", "")
"""That of no row."""


def content_of(runtime: Runtime, task_id: str, generation: int = 1) -> Content:
    """The content of a row as it is now; that of no row if it is not there."""
    row = None if "\0" in task_id else tasks.content_of(runtime.connections, (task_id, generation))
    return NOTHING if row is None else Content(row.task, row.digest)

"""The error a revoked asking ends with: ours and Celery's at once."""

from __future__ import annotations

from celery.exceptions import TaskRevokedError as CeleryTaskRevokedError

from ...model import errors


class TaskRevokedError(errors.TaskRevokedError, CeleryTaskRevokedError):
    """The asking was revoked, or expired before it ran: it ended as failed, later askings run.

    Whoever waits for the result catches it by our name or by Celery's.
    """

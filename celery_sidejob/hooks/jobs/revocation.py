"""The error of a revoked asking: ours and Celery's at once."""

from __future__ import annotations

from celery.exceptions import TaskRevokedError as CeleryTaskRevokedError

from ...model import errors


class TaskRevokedError(errors.TaskRevokedError, CeleryTaskRevokedError):
    """The asking was revoked, or expired before it ran: it has failed, and later askings run.

    A caller that waits for the result can catch it by our name or by Celery's.
    """

"""Errors that are ours and Celery's or kombu's at once: a caller can catch them by either name."""

from __future__ import annotations

from celery.exceptions import TaskRevokedError as CeleryTaskRevokedError
from kombu.exceptions import OperationalError

from ..model import errors


class Overloaded(errors.Overloaded, OperationalError):
    """A capacity pool is full, and nothing was written: `pool`, its `limit`, `used` slots, and `retry_after` seconds.

    Code that expects a broker to refuse messages can catch it by kombu's name.
    """


class TaskRevokedError(errors.TaskRevokedError, CeleryTaskRevokedError):
    """The asking was revoked, or expired before it ran: it has failed, and later askings run.

    A caller that waits for the result can catch it by our name or by Celery's.
    """

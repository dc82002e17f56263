"""Replaces `execute_using_pool` and `on_success` of the `Request` that Celery generates for each task.

Read in Celery 5.5.0 and 5.7.0: `celery.worker.request.create_request_cls` makes a subclass of a task's own Request, an
official extension point, and overrides these two in it, so that an override of ours is never called. If a later Celery
generates no subclass, or with other methods, ours are not wrapped: a worker with solo begins a run within another, and
what was given back begins all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any


def wrap_generated(cls: type, **by: Callable[..., Any]) -> None:
    """Wrap those of the methods that the class itself has; each of `by` is given the object, and what it replaces."""
    for name, replacement in by.items():
        if name in cls.__dict__:
            setattr(cls, name, partialmethod(replacement, cls.__dict__[name]))

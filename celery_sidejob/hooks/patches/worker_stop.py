"""Replaces `WorkController.stop` of one worker; read in Celery 5.5.0 and 5.7.0.

A warm stop waits in it for the bodies of the pool. If bodies run in the worker's own process, a cold stop that comes
meanwhile raises WorkerTerminate from there, and Celery terminates no step of the worker. Ours tells of it. If a later
Celery stops by another method, such a worker waits for its bodies to the end and gives nothing back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.exceptions import WorkerTerminate

from .wrapping import wrap


def install(worker: Any, cut_off: Callable[[Any], None]) -> None:
    """Have `cut_off` called with the worker when a cold stop ends its warm stop."""

    def stop(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return before(*args, **options)
        except WorkerTerminate:
            cut_off(worker)
            raise

    wrap(worker, "stop", stop)

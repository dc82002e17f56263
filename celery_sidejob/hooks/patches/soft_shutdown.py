"""Replaces `WorkController.wait_for_soft_shutdown` of one worker; read in Celery 5.5.0 and 5.7.0.

A cold stop calls it first, and it sleeps for `worker_soft_shutdown_timeout`, the time that runs have to end in. Celery
tells of such a stop only after that time. Ours announces it before, to bodies that look whether they are to stop. If a
later Celery waits in another way, they are told when it is too late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wrapping import wrap


def install(worker: Any, announce: Callable[[], None]) -> None:
    """Have `announce` called before the worker waits."""

    def wait(before: Callable[[], None]) -> None:
        announce()
        before()

    wrap(worker, "wait_for_soft_shutdown", wait)

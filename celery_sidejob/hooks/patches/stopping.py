"""Replaces the methods of one worker that stop it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.exceptions import WorkerTerminate

from .wrapping import wrap


def announce_soft_shutdown(worker: Any, announce: Callable[[], None]) -> None:
    """Call `announce` before the worker waits.

    Replaces `WorkController.wait_for_soft_shutdown` of one worker; read in Celery 5.5.0 and 5.7.0.

    A cold stop calls it first, and it sleeps for `worker_soft_shutdown_timeout`, the time in which runs should end.
    Celery announces such a stop only after that time. Ours announces it before, to bodies that check whether they
    should stop. If a later Celery waits in another way, they learn of it too late.
    """

    def wait(before: Callable[[], None]) -> None:
        announce()
        before()

    wrap(worker, "wait_for_soft_shutdown", wait)


def tell_of_cut_off(worker: Any, cut_off: Callable[[Any], None]) -> None:
    """Call `cut_off` with the worker when a cold stop ends its warm stop.

    Replaces `WorkController.stop` of one worker; read in Celery 5.5.0 and 5.7.0.

    A warm stop waits in it for the bodies of the pool. If bodies run in the worker's own process, a cold stop that
    comes meanwhile raises WorkerTerminate from there, and Celery terminates no step of the worker. Ours reports it. If
    a later Celery stops by another method, such a worker waits for its bodies to the end and gives nothing back.
    """

    def stop(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return before(*args, **options)
        except WorkerTerminate:
            cut_off(worker)
            raise

    wrap(worker, "stop", stop)

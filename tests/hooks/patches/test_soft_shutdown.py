"""A cold stop waits by `WorkController.wait_for_soft_shutdown` before it cuts anything off."""

from __future__ import annotations

import inspect
import signal
from typing import Any

from celery.apps.worker import on_cold_shutdown
from celery.worker import WorkController

from celery_sidejob.hooks.patches import celery_worker


def test_it_is_announced_before_a_cold_stop_waits(make_worker: Any) -> None:
    assert list(inspect.signature(WorkController.wait_for_soft_shutdown).parameters) == ["self"]
    worker = make_worker()
    told: list[str] = []
    for name in ("cancel_active_requests", "cancel_all_unacked_requests"):
        setattr(worker.consumer, name, lambda: told.append("cut off"))
    worker.wait_for_soft_shutdown = lambda: told.append("waits")
    celery_worker.announce_soft_shutdown(worker, lambda: told.append("announced"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)}
    try:
        on_cold_shutdown(worker)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    assert told[:3] == ["announced", "waits", "cut off"]

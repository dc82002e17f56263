"""The beat task: one sweep, wherever it runs. It is what keeps jobs going where workers do not sweep."""

from __future__ import annotations

import dataclasses
from typing import Any

from celery import Celery, _state

from .patches import app_methods

TASK = "celery_sidejob.poll"
ENTRY = "celery-sidejob-poll"


def entry(app: Celery, interval_s: float, queue: str | None) -> dict[str, Any]:
    """Return the schedule's entry; a poll that waits longer than the interval is worthless, and expires."""
    return {
        "task": TASK,
        "schedule": interval_s,
        "options": {
            "queue": queue or app.conf.task_default_queue,
            "expires": interval_s * 0.9,
            "ignore_result": True,
        },
    }


def _register(app: Celery) -> None:
    def poll() -> dict[str, Any]:
        """Sweep once and report it."""
        return dataclasses.asdict(app.sidejob.poll())

    app_methods.make_task(app, poll, name=TASK, ignore_result=True, acks_late=False)


_state.connect_on_app_finalize(_register)

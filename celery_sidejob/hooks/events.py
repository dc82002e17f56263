"""Celery's monitoring events of jobs, for Flower and other monitors.

A run's events are those of Celery itself, with the asking's task id as uuid; its arguments stay in the store, so that
events and log lines name the job instead. Two are ours: `task-suspended` and `task-terminated`.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery
from celery.exceptions import Ignore

from ..model.messages import Doorbell

logger = logging.getLogger("celery_sidejob")


class Rested(Ignore):
    """Tells a worker's parent that a run is over whose asking has no result now; the event that says so is `event`."""

    event: str


class Suspended(Rested):
    """The job is suspended: its asking goes on with the next run."""

    event = "task-suspended"


class Terminated(Rested):
    """The job's shutdown is over: it is terminated."""

    event = "task-terminated"


def shown_args(job_id: int) -> str:
    """Return what stands for a job's arguments where Celery shows those of a message."""
    return f"(job {job_id})"


def announce_sent(app: Celery, bell: Doorbell, producer: Any) -> None:
    """Send `task-sent` for a doorbell that the broker has, where `task_send_sent_event` asks for it."""
    if not app.conf.task_send_sent_event:
        return
    options = bell.options or {}
    try:
        app.amqp._event_dispatcher.publish(
            "task-sent",
            {
                "uuid": bell.task_id, "root_id": options.get("root_id") or bell.task_id,
                "parent_id": options.get("parent_id"), "name": bell.task, "args": shown_args(bell.job_id),
                "kwargs": "{}", "retries": 0, "eta": None, "expires": None, "queue": bell.queue, "exchange": "",
                "routing_key": bell.queue,
            },
            producer,
            retry=False,
        )  # fmt: skip
    except Exception as error:  # it is only an event, and the message is with the broker
        logger.debug("task-sent of %s was not sent: %s", bell.task_id, error)

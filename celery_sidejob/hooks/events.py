"""Celery's monitoring events of jobs, for Flower and other monitors.

A run's events are those of Celery itself, with the asking's task id as uuid; its arguments stay in the store, so that
events and log lines name the job instead. Two are ours: `task-suspended` and `task-terminated`.

Celery announces that a task was revoked in the worker that has its message. The message of a durable task may be in no
worker: then the process that ends the task announces it (`announce_revoked`).
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from celery import Celery, signals
from celery.app.task import Context
from celery.exceptions import Ignore

from ..model.durable import Message


class Rested(Ignore):
    """Tells a worker's parent that a run is over while its asking has no result yet; `event` is the event to send."""

    event: str


class Suspended(Rested):
    """The job is suspended: its asking goes on with the next run."""

    event = "task-suspended"


class Terminated(Rested):
    """The job's shutdown is over: it is terminated."""

    event = "task-terminated"


class Listening(NamedTuple):
    """A worker's consumer, and whether the worker was started with task events (`-E`)."""

    consumer: Any
    task_events: bool


_listening: weakref.WeakKeyDictionary[Celery, Listening] = weakref.WeakKeyDictionary()
"""The worker of each app in this process."""


def remember(consumer: Any, task_events: bool) -> None:
    """Remember this worker's consumer, which need not be connected yet."""
    _listening[consumer.app] = Listening(consumer, task_events)


def announce_revoked(app: Celery, message: Message, request: Context) -> None:
    """Send `task-revoked`, if events are wanted, and the signal `task_revoked`, for a task that no worker had."""
    task = app.tasks.get(message.task)
    if _are_wanted(app) and getattr(task, "send_events", True):
        listening = _listening.get(app)
        sending = app.events.Dispatcher(
            hostname=listening.consumer.hostname if listening else None, enabled=False, buffer_while_offline=False
        )
        fields = {"uuid": message.task_id, "terminated": False, "signum": None, "expired": False}
        app.sidejob.runtime.publisher.announce(
            lambda producer: sending.publish("task-revoked", fields, producer, retry=False)
        )
    signals.task_revoked.send(sender=task, request=request, terminated=False, signum=None, expired=False)


def _are_wanted(app: Celery) -> bool:
    """Whether the app's worker here sends task events now; in a process without a worker, as configured."""
    listening = _listening.get(app)
    if listening is None:
        return bool(app.conf.worker_send_task_events)
    dispatcher = listening.consumer.event_dispatcher
    if dispatcher is None:  # before the first connection: the sweeper begins with the worker
        return listening.task_events
    # Without -E a dispatcher still sends events of its worker. The control commands change the groups.
    return bool(dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups))

"""How others learn of events: our signals, in Celery's style, and log lines; and Celery's monitoring events of jobs.

A receiver of a signal that raises stops nothing.

The monitoring events, for Flower and others, are those of Celery itself, with the asking's task id as uuid; its
arguments stay in the store, so that events and log lines name the job instead. Two are ours: `task-suspended` and
`task-terminated`. Celery announces that a task was revoked in the worker that has its message. The message of a durable
task may be in no worker: then the process that ends the task announces it (`announce_revoked`).
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import asdict
from typing import Any, NamedTuple

from celery import Celery, signals
from celery.app.task import Context
from celery.exceptions import Ignore
from celery.utils.dispatch import Signal

from ..model import events
from ..model.durable import Message
from ..model.logger import logger
from ..model.statistics import Measures

status_changes = logging.getLogger("celery_sidejob.events")
"""One line for each status change, with the facts as attributes of the record."""

job_status_changed = Signal(name="job_status_changed", providing_args={"job_id", "task", "before", "after", "change"})
"""A job moved. Sent after the commit, by the process that made it; `before` is None for a new job.

`change` is greater for each later change of the same job: signals of two processes may come in another order.
"""

task_lost = Signal(name="task_lost", providing_args={"job_id", "task", "run_no", "why", "loss"})
"""A run was lost with its worker. For a durable task `task_id` is set, and `job_id` and `run_no` are None.

`why` is a sentence; `loss` has its facts: `host`, `worker`, `process`, `exit_code`, `signal`, `out_of_memory`.
"""

task_recovered = Signal(name="task_recovered", providing_args={"job_id", "task", "run_no"})
"""A lost run was rescued: its job is queued again, with its inputs as they were.

For a durable task, with `task_id`: it runs again, or it was declared lost, and has ended well after all.
"""

task_buried = Signal(name="task_buried", providing_args={"entry_id", "job_id", "task", "reason"})
"""A job was entered in the dead set, or a durable task (then `job_id` is None, and `task_id` is set)."""

step_ended = Signal(
    name="step_ended",
    providing_args={"job_id", "task", "run_no", "name", "number", "kind", "seconds", "tries", "outcome"},
)
"""A run has done a step, or failed to; `outcome` is `completed`, `failed` or `retried`.

Sent by the process of the run: after the commit of the step's record, or as the error is raised.
"""

SIGNALS: dict[type[events.Event], Signal] = {
    events.JobMoved: job_status_changed,
    events.JobBuried: task_buried,
    events.RunLost: task_lost,
    events.RunRescued: task_recovered,
    events.TaskBuried: task_buried,
    events.TaskLost: task_lost,
    events.TaskRescued: task_recovered,
    events.TaskEndedWell: task_recovered,
    events.StepEnded: step_ended,
}
"""The signals of events."""

TEXTS: dict[type[events.Event], str] = {
    events.JobBuried: "Job %(job_id)d (%(task)s) was entered in the dead set: %(reason)s",
    events.JobParked: "Job %(job_id)d is parked: no worker of queue %(queue)s knows its task %(task)s. Nothing is "
    "lost: it waits in the store, and goes on when a worker starts that imports the task. Start one, or terminate the "
    "job",
    events.TaskParked: "Task %(task_id)s is parked: no worker of queue %(queue)s knows the task %(task)s. Nothing is "
    "lost: it waits in the store, and goes on when a worker starts that imports the task. Start one; after a day it "
    "goes to the dead set",
    events.RunLost: "Run %(run_no)d of job %(job_id)d (%(task)s) was lost with its worker: %(why)s",
    events.RunReturned: "Run %(run_no)d of job %(job_id)d (%(task)s) comes back from a worker that is gone",
    events.TaskBuried: "Task %(task_id)s (%(task)s) was entered in the dead set: %(reason)s",
    events.TaskLost: "Task %(task_id)s (%(task)s) was lost with its worker: %(why)s",
    events.TaskReturned: "Task %(task_id)s (%(task)s) comes back from a worker that is gone, and runs again",
    events.TaskEndedWell: "Task %(task_id)s (%(task)s) was called lost while its worker was silent; it has ended well",
}
"""The log lines of events; an event's fields are also attributes of the record."""


class SignalObserver:
    """Writes events to the log, counts them, and sends their signals."""

    def __init__(self, measures: Measures, *, keeps_statistics: bool) -> None:
        self._measures = measures
        self._keeps_statistics = keeps_statistics

    def tell(self, event: events.Event) -> None:
        """Log an event, count it and send its signal."""
        match event:  # the first three are only counted
            case events.Swept():
                for total, amount in event.totals.items():
                    self._measures.count(total, amount=amount)
            case events.TaskFinished():
                self._measures.finish(event)
            case events.Measured():
                if self._keeps_statistics:
                    self._measures.tally(event.queue, event.task, event.measure, event.seconds, event.step)
            case _:
                self._tell(event)

    def _tell(self, event: events.JobEvent | events.TaskEvent) -> None:
        _log(event)
        if event.total is not None and self._measures.begun:
            label = str(getattr(event, event.counted_by)) if event.counted_by is not None else ""
            self._measures.count(event.total, label)
        signal = SIGNALS.get(type(event))
        if signal is not None and signal.receivers:
            facts = {name: getattr(event, name, None) for name in signal.providing_args}
            if isinstance(event, events.TaskEvent):
                facts["task_id"] = event.task_id
            signal.send(sender=event.task, **facts)

    @property
    def is_heard(self) -> bool:
        """Whether a receiver in this process is sent the signal of jobs that move."""
        return bool(job_status_changed.receivers)


def _log(event: events.JobEvent | events.TaskEvent) -> None:
    """Write a line about an event. Celery has already logged a failure as an error: one error, one report."""
    if isinstance(event, events.JobMoved) and status_changes.isEnabledFor(logging.INFO):
        facts = {name: value for name, value in asdict(event).items() if value is not None or name == "before"}
        status_changes.info(
            "Job %d (%s): %s -> %s",
            event.job_id,
            event.task,
            event.before or "new",
            event.after,
            extra={**facts, "after": str(event.after)},
        )
    text = TEXTS.get(type(event))
    if text is not None:
        facts = asdict(event)
        level = logging.ERROR if facts.get("reason") in ("lost", "shutdown lost") else logging.WARNING
        logger.log(level, text, facts, extra=facts)


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

"""A delivery in the worker's parent process, of a job or of a durable task: what both tell the worker of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery.concurrency.solo import TaskPool as Solo
from celery.concurrency.thread import TaskPool as Threads
from celery.exceptions import TaskRevokedError, WorkerTerminate
from celery.platforms import EX_OK
from celery.worker.request import Request
from celery.worker.state import active_requests, reserved_requests, task_ready
from kombu.transport import virtual

from ...model import native
from ...model.durable import WORKER
from ...model.logger import logger
from ...services.heartbeat.deliveries import RELEASED, Deliveries, Delivery
from ...store.claims import Owed
from ...store.outbox.holds import Fresh
from ...store.results import Ended
from ..patches.celery_worker import wrap_generated
from ..patches.connections import is_redis
from .pool_process import has, has_processes, not_begun, trace_leaving
from .received import OF_THE_PARENT, check_request

_deciding = native.lock()
"""Held for a moment to begin a run, perhaps by a thread of the pool, or to give its message back: not both happen."""


class Delivered(Request):
    """Celery's request, with a row behind it (`_has_row`), or none yet: then the message is all there is."""

    _header: tuple[str, Callable[[object], str | None]]
    """The header by which our publishers tell of a row, and the function that says what is wrong with one."""
    _solo_is_busy = False
    """Whether the one process of a solo worker is running a body."""

    _key: Any
    """The key of its run: of a job the number, of a durable task the id, and the number of the run or generation."""
    _deliveries: Sequence[tuple[Deliveries[Any], Delivery[Any]]] = ()
    """What the worker notes of it, for each store in which its row may be."""
    over_here: Callable[[], object] = staticmethod(lambda: None)
    """Called when a delivery is over: its place in the pool may be free."""
    concurrency: Callable[[], int] = staticmethod(lambda: len(active_requests))
    """Returns how many runs the pool takes at a time; without an `Appetite`, how many it has."""
    acks_at_end = False
    """Whether this worker acknowledges messages after their run, also where it might do so before."""
    held: Any = None
    """How this worker holds its row, if it does: a `HeldRun` or a `Claimed`."""
    _is_acknowledged_for_hold = False
    _is_being_accepted = False
    _has_begun = False
    _was_given_back = False
    _connection_is_lost = False
    """Whether the worker's connection to the broker has just broken, and Celery cancels for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error, mostly InvalidTaskError, for a message that is not of a task."""
        super().__init__(*args, **kwargs)
        check_request(self._request_dict, self._payload, *self._header)
        for ours in OF_THE_PARENT:
            self._request_dict.pop(ours, None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap what Celery's generated subclass redefines."""
        super().__init_subclass__(**kwargs)
        wrap_generated(cls, execute_using_pool=_one_at_a_time, on_success=_then_over)

    @property
    def _has_row(self) -> bool:
        raise NotImplementedError

    def _has_gate(self, *stores: Any) -> bool:
        """Tell whether its queue may be managed, as the heartbeats in these stores know: then its process asks."""
        queue = self._app.sidejob.runtime.tasks.delivered_from(self._message.delivery_info or {})
        return any(
            heartbeat.managed is None or (queue is None and heartbeat.managed) or queue in heartbeat.managed
            for heartbeat in stores
        )

    @property
    def request_dict(self) -> dict[str, Any]:
        """The request as the pool's process gets it: with the identity under which this worker claims just now."""
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat.may_claim:
            self._request_dict[WORKER] = heartbeat.worker_id
        given: dict[str, Any] = self._request_dict
        return given

    def traced(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        """Return what its process runs in place of Celery's tracer: this worker may have to write the run's end."""
        return partial(trace_leaving, trace)

    def end(self, over: Ended) -> None:
        """End its run, as its process has left only that to this worker."""
        raise NotImplementedError

    def send_event(self, type: str, **fields: Any) -> None:
        """Send a monitoring event, its error and traceback redacted."""
        shown = {key: self._redacted(fields[key]) for key in ("exception", "traceback") if fields.get(key)}
        super().send_event(type, **{**fields, **shown})

    @property
    def waits(self) -> bool:
        """Whether it was neither begun here nor given back, nor ended before it was begun."""
        return not (self._has_begun or self._was_given_back or self.acknowledged)

    def begins(self) -> bool:
        """Note that it begins here, and return True; False if its message was given back."""
        with _deciding:
            self._has_begun = not self._was_given_back
            return self._has_begun

    def give_back(self) -> bool:
        """Return its message to the head of its queue, unless it begins here; in the thread that fetches."""
        with _deciding:
            if not self.waits:
                return False
            self._was_given_back = True
        undeliver(self)
        self.over()
        self.unhold()
        return True

    @property
    def fresh(self) -> Fresh | Owed | None:
        """What is to be held for it before it waits for the pool; None if its process is to lock the row."""
        raise NotImplementedError

    def hold(self, held: Any) -> None:
        """Note that this worker holds its row."""
        raise NotImplementedError

    def unhold(self) -> None:
        """Have its row given back, if this worker holds it and its run will not begin."""
        raise NotImplementedError

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Note which process runs it."""
        if not self._has_begun and not self.begins():
            raise not_begun()  # its place in a pool of threads or greenlets is another's
        for runs, delivery in self._deliveries:
            # gevent gives the greenlet's number, which is no process
            runs.accepted(delivery, pid if self._heartbeat.has_processes else os.getpid())
        self._is_being_accepted = True
        try:
            super().on_accepted(pid, time_accepted)
            if self.held is not None and not (self.acks_at_end or self.acknowledged):
                # No timeout of the broker may send it again. Celery does not know: a cold stop has to cut this run off.
                self._is_acknowledged_for_hold = True
                self._on_ack(logger, self._connection_errors)
        finally:
            self._is_being_accepted = False

    def acknowledge(self) -> None:
        """Acknowledge early only what has a row: of another message it is all there is, until it is over."""
        if self._is_acknowledged_for_hold:
            self.acknowledged = True
        elif not self._is_being_accepted or (self._has_row and not self.acks_at_end):
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        """Reject what is not acknowledged for its hold."""
        if self._is_acknowledged_for_hold:
            self.acknowledged = True
        else:
            super().reject(requeue=requeue)

    def cancel(self, pool: Any, *args: Any, **options: Any) -> None:
        """Cut off by a cold stop: the death of its process is then no loss.

        Where bodies run in the worker's own process, the whole worker ends now, and gives back what it holds. Solo and
        threads cannot stop a task; with gevent Celery would wait for bodies that do not heed it. Or cut off because
        the connection broke (`worker_cancel_long_running_tasks_on_connection_loss`): there the worker goes on, and so
        does the body, where nobody can stop it.
        """
        if Delivered._connection_is_lost and isinstance(pool, Solo | Threads):
            raise NotImplementedError(f"a body in {type(pool).__module__} cannot be stopped")
        self._plan(RELEASED)
        if Delivered._connection_is_lost or self._heartbeat is None or self._heartbeat.has_processes:
            super().cancel(pool, *args, **options)
            return
        with suppress(NotImplementedError):
            for request in list(active_requests):
                pool.terminate_job(request.worker_pid)
        raise WorkerTerminate(EX_OK)

    def _plan(self, plan: str) -> None:
        for runs, _ in self._deliveries:
            runs.planned(self._key, plan)

    def over(self) -> None:
        """Note that nothing comes of this delivery any more."""
        for runs, delivery in self._deliveries:
            runs.over(delivery)
        if self.acks_at_end and self._has_row:
            self.acknowledge()
        self.over_here()

    def _redacted(self, value: Any) -> Any:
        sidejob = getattr(self._app, "sidejob", None)
        return value if sidejob is None else sidejob.settings.redacted(value)

    @property
    def _heartbeat(self) -> Any:
        return getattr(getattr(self._app, "sidejob", None), "heartbeat", None)


def begins_held(pool: Any, request: Any) -> bool:
    """Tell whether the pool begins a request without locking its row, though the worker's connection has broken.

    If it does not yet, it never will: the row is given up.
    """
    if getattr(request, "held", None) is None:
        return False
    with _deciding:
        request._was_given_back = not request._has_begun or (has_processes(pool) and not has(pool, request))
        return not request._was_given_back


def undeliver(request: Any) -> None:
    """Forget a request whose run has not begun, and return its message to the head of its queue."""
    task_ready(request)
    return_to_head(request.message, request.connection_errors)
    request.acknowledged = True
    request.send_event("task-rejected", requeue=True)


def return_to_head(message: Any, connection_errors: tuple[type[BaseException], ...]) -> None:
    """Give a message that has not begun back to the broker, to be served next.

    kombu's Redis transport would serve it last, and ours would count it among those that had begun.
    """
    channel, tag = message.channel, message.delivery_tag
    if not is_redis(channel) and not hasattr(channel, "give_back"):
        message.reject_log_error(logger, connection_errors, requeue=True)
        return
    with suppress(*connection_errors):  # then the sweeper finds that nobody has it
        if hasattr(channel, "give_back"):  # of our transports
            channel.give_back(tag)
        else:
            channel.qos.restore_by_tag(tag)
            virtual.QoS.ack(channel.qos, tag)
        message._state = "REQUEUED"


def note_lost_connection(is_lost: bool) -> None:
    """Note whether what Celery cancels now is cut off by a connection that broke, and not by a stop."""
    Delivered._connection_is_lost = is_lost


def _one_at_a_time(self: Delivered, execute: Callable[..., Any], pool: Any, **options: Any) -> Any:
    if pool.uses_semaphore and not self.begins():
        raise TaskRevokedError("given back")  # Celery's worker then passes its place in the pool on
    if not isinstance(pool, Solo):
        return execute(self, pool, **options)
    if Delivered._solo_is_busy:
        # A cold stop asks RabbitMQ, in the midst of a run, to send nothing more. What it has sent already is received
        # while Celery waits for the answer, and would run to its end within the other run.
        return self.give_back()
    Delivered._solo_is_busy = True
    try:
        return execute(self, pool, **options)
    finally:
        Delivered._solo_is_busy = False


def is_busy() -> bool:
    """Tell whether at least as many messages wait here as a full pool runs: the worker needs no others for a while."""
    return len(reserved_requests) >= 2 * max(1, Delivered.concurrency())


def _then_over(self: Delivered, on_success: Callable[..., Any], outcome: Sequence[Any], **options: Any) -> Any:
    try:
        for over in outcome[3:]:  # beside what Celery knows
            self.end(over)
        return on_success(self, outcome[:3], **options)
    finally:
        self.over()

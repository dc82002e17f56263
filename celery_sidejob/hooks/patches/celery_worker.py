"""Replaces methods of one worker, of its consumer, and of the requests that it makes from messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from queue import Empty
from typing import Any

from amqp.exceptions import NotFound, RecoverableConnectionError
from celery.exceptions import InvalidTaskError, WorkerTerminate

from ...model.logger import logger
from . import wrap
from .pools import report


def survive_deleted_queues(blueprint: Any) -> None:
    """Make a queue that is deleted while a worker connects break the connection, and not the worker.

    Replaces `Blueprint.start` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

    Celery's `Consumer.start` calls ``blueprint.start(consumer)`` in a loop, and connects again after an error of the
    connection. It declares its queues, binds them, is busy for a while, and consumes: RabbitMQ's answer for a queue
    that was deleted meanwhile (`NotFound`) is no error of the connection, and would end the worker. Ours turns it into
    one: with a new connection all queues are declared again. If a later Celery starts in another way, such a deletion
    ends a worker.
    """
    wrap(blueprint, "start", _start)


def _start(before: Callable[[Any], None], consumer: Any) -> None:
    try:
        before(consumer)
    except NotFound as error:
        # Queues that its user declares himself must exist.
        if any(queue.no_declare for queue in consumer.app.amqp.queues.consume_from.values()):
            raise
        raise RecoverableConnectionError(f"a queue of this worker was deleted: {error}") from error


def note_lost_connections(consumer: Any, note: Callable[[bool], None]) -> None:
    """Call `note` when Celery begins to handle a broken connection, and when it has handled it.

    Replaces `Consumer.on_connection_error_after_connected` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

    With `worker_cancel_long_running_tasks_on_connection_loss` it cancels runs by `Request.cancel`, as a cold stop does.
    If bodies run in the worker's own process, a cold stop ends that process. Ours notes which of the two it is. If a
    later Celery cancels from elsewhere, a worker with threads or gevent ends when its connection breaks.
    """

    def handle(before: Callable[[Exception], Any], error: Exception) -> Any:
        note(True)
        try:
            return before(error)
        finally:
            note(False)

    wrap(consumer, "on_connection_error_after_connected", handle)


OF_MESSAGES = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Errors of a malformed message, though kombu may count them among the errors of a connection, such as KeyError."""


def give_up_malformed(consumer: Any) -> None:
    """Give up a message that cannot be taken, whatever it contains, and let the worker continue with the next.

    Replaces `Consumer.create_task_handler` of one worker's consumer; read in Celery 5.5.0 and 5.7.0.

    It returns the function that is called with each message. Celery gives a message up after errors of two classes. Any
    other error, for example from a task name that is a list, ends the worker, or looks like the loss of the broker:
    then the message comes again at once. A program that can write into a queue could stop all its workers. If a later
    Celery takes messages elsewhere, one malformed message ends a worker.
    """
    wrap(consumer, "create_task_handler", partial(_create, consumer))


def _create(consumer: Any, before: Callable[[], Callable[[Any], Any]]) -> Callable[[Any], None]:
    take = before()
    errors = (*consumer.connection_errors, *consumer.channel_errors, MemoryError)
    not_of_messages = tuple(error for error in errors if not issubclass(error, OF_MESSAGES))

    def take_or_give_up(message: Any) -> None:
        try:
            take(message)
        except not_of_messages:
            raise
        except Exception as error:
            if message.acknowledged:
                logger.exception("A message was given up, but that could not be told to all who want to know of it")
            else:
                consumer.on_invalid_task(None, message, error)

    return take_or_give_up


def refuse_by(consumer: Any, by: Callable[[Any, BaseException, bool], bool]) -> None:
    """Give a message that the worker refuses to `by`; if that returns False, Celery handles it in its own way.

    `by` takes the message, the error, and whether the message names a task that the worker does not know.

    Replaces `on_unknown_task`, `on_invalid_task` and `on_decode_error` of one worker's `Consumer` of Celery.

    Read in Celery 5.5.0 and 5.7.0. Celery rejects a message whose task the worker does not know, and stores a failure
    as the result of its task id. It drops a message that it cannot read. If a later Celery asks in another way, that
    also happens to messages that have a row: their results show FAILURE until a run has ended, and they come again and
    again.
    """
    for name in ("on_unknown_task", "on_invalid_task", "on_decode_error"):
        wrap(consumer, name, partial(_refuse, by, name == "on_unknown_task"))


def _refuse(
    by: Callable[[Any, BaseException, bool], bool], is_unknown: bool, before: Callable[..., Any], *of: Any
) -> Any:
    *_, message, error = of  # the first two functions also get the body, before these
    return None if by(message, error, is_unknown) else before(*of)


MOST_S = 2**31
"""The most seconds of a time limit. Celery's pools compare it, or wait for it, where an error ends the worker."""


def hand_over_by(consumer: Any, handle: Callable[[Callable[[Any], Any], Any], None]) -> None:
    """Call `handle` with Celery's own function and the request.

    Replaces `Consumer.on_task_request` of one worker's consumer, and `WorkController._process_task` of its worker.

    Read in Celery 5.5.0 and 5.7.0. The first is the function that hands a request to the pool: an attribute that the
    strategies of tasks, rate limits and timers for an eta all look up when they are made, which is after our step. Ours
    first notes which requests wait for the pool, and stops fetching before a message fills it. The second is called in
    the end, at once or when the pool has room: an error of the message, which is raised there, would end the worker, or
    occupy a slot of the pool for good. If a later Celery hands requests over in another way, messages wait behind long
    runs while other workers are idle, and a malformed message ends a worker.
    """
    worker = consumer.controller
    begins_at_once = consumer.on_task_request == worker._process_task
    wrap(worker, "_process_task", partial(_begin_or_report, worker))
    if begins_at_once:
        consumer.on_task_request = worker._process_task
    wrap(consumer, "on_task_request", handle)


def _begin_or_report(worker: Any, before: Callable[[Any], Any], request: Any) -> None:
    try:
        for limit in request.time_limits:
            if not (limit is None or (isinstance(limit, int | float) and 0 <= limit < MOST_S)):
                raise InvalidTaskError(f"a time limit of the message is no time: {limit!r:.60}")
        before(request)
    except Exception as error:
        report(error, request.on_failure)
        if worker.semaphore is not None:
            worker.semaphore.release()


def wrap_generated(cls: type, **by: Callable[..., Any]) -> None:
    """Wrap the methods that the class itself has; each of `by` gets the object, and the method that it replaces.

    Replaces `execute_using_pool` and `on_success` of the `Request` that Celery generates for each task.

    Read in Celery 5.5.0 and 5.7.0: `celery.worker.request.create_request_cls` makes a subclass of a task's own Request,
    an official extension point, and overrides these two in it, so that our override is never called. If a later Celery
    generates no subclass, or overrides other methods, ours are not wrapped: a worker with solo begins a run within
    another, and a run that was given back begins all the same.
    """
    for name, replacement in by.items():
        if name in cls.__dict__:
            setattr(cls, name, partialmethod(replacement, cls.__dict__[name]))


def drop_unreadable(poller: Any) -> None:
    """Drop texts that cannot be read, and let the worker continue with the next message.

    Replaces `MultiChannelPoller.on_readable` of one worker's connection to Redis; read in kombu 5.5.2 and 5.7.0.

    It reads an answer of Redis, and delivers the message in it. A text that is not a kombu message raises an error
    there, before Celery sees it, and ends the worker. Ours logs the error. If a later kombu reads elsewhere, one such
    text in a queue ends a worker.
    """
    wrap(poller, "on_readable", _read_or_drop)


def _read_or_drop(before: Callable[[int], Any], fileno: int) -> Any:
    try:
        return before(fileno)
    except OF_MESSAGES:
        logger.exception("What Redis sent is no message, and was dropped")
        raise Empty from None


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

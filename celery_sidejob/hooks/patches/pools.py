"""Replaces `TaskPool.on_apply` of one pool; read in Celery 5.5.0 and 5.7.0, billiard 4.2.1 and 4.3.2.

`BasePool.apply_async` calls it to begin a run. A pool of processes reports an error outside Celery's tracer, over a
body that cannot be decoded or a `chain` that is no list, to the request. Other pools do not: a thread forgets the
error, and the request counts as running for good; with solo the error ends the worker. But a pool of processes keeps a
place for a request that cannot be pickled, and ends the worker if a body has raised MemoryError.

With gevent it waits for a free greenlet, in the greenlet that reads from the broker: RabbitMQ's next messages would
wait unread, and nobody could give them back. With threads it raises RuntimeError once a cold stop has closed them, as
Celery's handler of the signal does wherever it finds the worker.

If a later Celery begins runs in another way, malformed messages end workers or fill them, a busy worker with gevent
keeps messages, and a cold stop may log an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.worker import state
from kombu.utils import functional

from .wrapping import wrap

logger = logging.getLogger("celery_sidejob")


def report_failures(pool: Any) -> None:
    """Have a request told of whatever ends its run, or keeps it from being begun, and the worker go on."""
    if hasattr(getattr(pool, "_pool", None), "_cache"):
        wrap(pool, "on_apply", partial(_send_or_forget, pool._pool))
        return
    passed: tuple[type[BaseException], ...] = (WorkerShutdown, WorkerTerminate)
    if getattr(pool, "is_green", False):
        from gevent import GreenletExit, Timeout  # it is there, as the pool is

        passed = (*passed, GreenletExit, Timeout)
    wrap(pool, "on_apply", partial(_run_or_report, passed))
    if getattr(pool, "executor", None) is not None:
        pool.unfinished = set()  # an executor does not say what it has
        wrap(pool, "on_apply", partial(_note, pool.unfinished))


def _note(unfinished: set[Any], before: Callable[..., Any], *args: Any, **options: Any) -> Any:
    result = before(*args, **options)
    unfinished.add(result.f)
    result.f.add_done_callback(unfinished.discard)
    return result


def _send_or_forget(
    processes: Any, before: Callable[..., Any], target: Callable[..., Any], *args: Any,
    callback: Callable[[Any], Any], error_callback: Callable[[Any], Any], **options: Any,
) -> Any:  # fmt: skip
    failed = partial(_tell, error_callback)
    try:
        return before(
            _traced(callback, target), *args, callback=partial(_tell, callback), error_callback=failed, **options
        )
    except Exception:
        for job in list(processes._cache.values()):
            if job._error_callback is failed:
                job.discard()  # the pool would wait for its end
        raise


def _run_or_report(
    passed: tuple[type[BaseException], ...], before: Callable[..., Any], target: Callable[..., Any], *args: Any,
    callback: Callable[[Any], Any], error_callback: Callable[[Any], Any], **options: Any,
) -> Any:  # fmt: skip
    trace = _traced(callback, target)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return trace(*args, **kwargs)
        except passed:
            raise
        except BaseException as error:
            report(error, error_callback)
            return None

    def ended(result: Any) -> None:
        if result is not None:
            _tell(callback, result)

    return before(run, *args, callback=ended, **options)


def _traced(callback: Callable[[Any], Any], target: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs a request, whose method `callback` is, in place of Celery's tracer."""
    traced: Callable[..., Callable[..., Any]] | None = getattr(callback.__self__, "traced", None)  # type: ignore[attr-defined]
    return target if traced is None else traced(target)


def report(error: BaseException, error_callback: Callable[[Any], Any]) -> None:
    """Tell a request of an error, by its method for that, and give its message up if it is not over by then.

    With anything but an ordinary error a process of a pool would have ended.
    """
    if not isinstance(error, Exception) or isinstance(error, MemoryError):
        error = WorkerLostError(repr(error)).with_traceback(error.__traceback__)
    _tell(error_callback, ExceptionInfo((type(error), error, error.__traceback__)))
    error_callback.__self__.reject(requeue=False)  # type: ignore[attr-defined]


def _tell(callback: Callable[[Any], Any], about: Any) -> None:
    """Tell a request how its run ended; if it fails over that, its message is given up."""
    try:
        callback(about)
    except Exception as error:
        request: Any = callback.__self__  # type: ignore[attr-defined]
        # Celery would end the worker over a MemoryError in a process of its pool, which has a memory of its own.
        unforeseen = None if isinstance(error, MemoryError) else error
        logger.error("The end of task %s could not be told to all: %s", request, error, exc_info=unforeseen)
        request.reject(requeue=False)


def let_messages_wait(pool: Any) -> None:
    """Let a message that finds all greenlets busy wait in one of its own, and the worker read on."""
    from gevent import spawn  # it is there, as the pool is

    waiting: set[Any] = set()

    def apply_or_wait(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not pool._pool.full() and not waiting:
            return before(*args, **options)
        greenlet = spawn(before, *args, **options)
        waiting.add(greenlet)
        greenlet.link(waiting.discard)
        return None  # there is nothing yet that could be terminated

    wrap(pool, "on_apply", apply_or_wait)


def end_quietly(pool: Any) -> None:
    """Have a cold stop not fail on a message that is just being received, when it has closed the pool's threads.

    The message has not been acknowledged: it is the broker's, as what waits for a thread is.
    """
    if getattr(pool, "executor", None) is not None:
        wrap(pool, "on_apply", _apply_unless_over)


def _apply_unless_over(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return before(*args, **options)
    except RuntimeError:  # "cannot schedule new futures after shutdown"
        if not state.should_terminate:
            raise
        return None


def remember_runs(pool: Any) -> None:
    """Have a pool of processes remember what runs in it, or will.

    Replaces `TaskPool.flush` of one pool of processes; read in Celery 5.5.0 and 5.7.0.

    When the connection to the broker broke, `Consumer.on_close` calls it to drop what the pool has not begun. Celery
    5.5 forgets with it, in `AsynPool._cache`, what runs: the worker then hears nothing of the end of these runs, nor
    that their process died, and they keep their places in the pool for ever. Celery 5.7 forgets only what was sent to a
    process that has not said yet that it begins; it begins all the same. Ours has the pool remember both. If a later
    Celery forgets them elsewhere, a worker begins fewer runs at a time after each break, and runs again what it has
    sent.
    """
    processes = getattr(pool, "_pool", None)
    if hasattr(processes, "_cache"):
        wrap(pool, "flush", partial(_flush, processes))


def _flush(processes: Any, before: Callable[[], None]) -> None:
    known = dict(processes._cache)
    before()
    sent = {number: job for number, job in known.items() if job._accepted or job._write_to}  # or half sent before
    processes._cache.update((number, job) for number, job in sent.items() if not job.ready())


def pause_in_greenlets() -> None:
    """Let bodies go on while kombu pauses.

    Replaces `kombu.utils.functional.sleep`, in a worker with gevent; read in kombu 5.5.2 and 5.7.0.

    `retry_over_time` calls this name of its module between two tries to connect: up to half a minute, on a broker that
    is down. gevent looks at all objects there are when it replaces Python's locks, Celery's lazy names among them,
    which import kombu; and it replaces `time.sleep` only after that. If a later kombu pauses by another name, all
    greenlets stand still while it connects.
    """
    functional.sleep = time.sleep

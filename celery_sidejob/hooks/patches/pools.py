"""Replaces methods of one pool, mostly `TaskPool.on_apply`; read in Celery 5.5.0 and 5.7.0, billiard 4.2.1 and 4.3.2.

`BasePool.apply_async` calls `on_apply` to begin a run. A pool of processes reports an error outside Celery's tracer (a
body that cannot be decoded, a `chain` that is no list) to the request. Other pools do not: a thread forgets the error,
and the request counts as running for good; with solo the error ends the worker. But a pool of processes reserves a slot
for a request that cannot be pickled, and ends the worker if a body has raised MemoryError.

With gevent it waits for a free greenlet, in the greenlet that reads from the broker: RabbitMQ's next messages would
wait unread, and could not be given back. With threads it raises RuntimeError once a cold stop has closed them, which
Celery's signal handler does at any moment.

If a later Celery begins runs in another way, malformed messages end workers or fill them, a busy worker with gevent
keeps messages, and a cold stop may log an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import concurrency
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.worker import state
from kombu.utils import functional

from ...model.logger import logger
from ...pools.coroutines import CutOff
from . import wrap


def report_failures(pool: Any) -> None:
    """Report to a request any error that ends its run or keeps it from beginning, and let the worker continue."""
    if hasattr(getattr(pool, "_pool", None), "_cache"):
        wrap(pool, "on_apply", partial(_send_or_forget, pool._pool))
        return
    passed: tuple[type[BaseException], ...] = (WorkerShutdown, WorkerTerminate, CutOff)
    if getattr(pool, "is_green", False):
        from gevent import GreenletExit, Timeout  # the pool is gevent's, so gevent is installed

        passed = (*passed, GreenletExit, Timeout)
    wrap(pool, "on_apply", partial(_run_or_report, passed))
    if getattr(pool, "executor", None) is not None:
        pool.unfinished = set()  # an executor does not list its work
        wrap(pool, "on_apply", partial(_note, pool.unfinished))


def _note(unfinished: set[Any], before: Callable[..., Any], *args: Any, **options: Any) -> Any:
    result = before(*args, **options)
    unfinished.add(result.f)
    result.f.add_done_callback(unfinished.discard)
    return result


def _send_or_forget(
    processes: Any,
    before: Callable[..., Any],
    target: Callable[..., Any],
    *args: Any,
    callback: Callable[[Any], Any],
    error_callback: Callable[[Any], Any],
    **options: Any,
) -> Any:
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
    passed: tuple[type[BaseException], ...],
    before: Callable[..., Any],
    target: Callable[..., Any],
    *args: Any,
    callback: Callable[[Any], Any],
    error_callback: Callable[[Any], Any],
    **options: Any,
) -> Any:
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
    """Return the function that runs a request in place of Celery's tracer; its method `callback` gets the outcome."""
    traced: Callable[..., Callable[..., Any]] | None = getattr(callback.__self__, "traced", None)  # type: ignore[attr-defined]
    return target if traced is None else traced(target)


def report(error: BaseException, error_callback: Callable[[Any], Any]) -> None:
    """Report an error to a request, by its method for that, and give its message up if it is not over by then.

    After anything but an ordinary error, a process of a pool would have ended.
    """
    if not isinstance(error, Exception) or isinstance(error, MemoryError):
        error = WorkerLostError(repr(error)).with_traceback(error.__traceback__)
    _tell(error_callback, ExceptionInfo((type(error), error, error.__traceback__)))
    error_callback.__self__.reject(requeue=False)  # type: ignore[attr-defined]


def _tell(callback: Callable[[Any], Any], about: Any) -> None:
    """Tell a request how its run ended; if that fails, its message is given up."""
    try:
        callback(about)
    except Exception as error:
        request: Any = callback.__self__  # type: ignore[attr-defined]
        # Celery would end the worker after a MemoryError in a pool process, which has its own memory.
        unforeseen = None if isinstance(error, MemoryError) else error
        logger.error("The end of task %s could not be told to all: %s", request, error, exc_info=unforeseen)
        request.reject(requeue=False)


def let_messages_wait(pool: Any) -> None:
    """Let a message that finds all greenlets busy wait in its own greenlet, while the worker reads on."""
    from gevent import spawn  # the pool is gevent's, so gevent is installed

    waiting: set[Any] = set()

    def apply_or_wait(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not pool._pool.full() and not waiting:
            return before(*args, **options)
        greenlet = spawn(before, *args, **options)
        waiting.add(greenlet)
        greenlet.link(waiting.discard)
        return None  # there is no run yet that could be terminated

    wrap(pool, "on_apply", apply_or_wait)


def end_quietly(pool: Any) -> None:
    """Let a cold stop that has closed the pool's threads not fail on a message that is just being received.

    The message is not acknowledged, so it still belongs to the broker, like messages that wait for a thread.
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
    """Let a pool of processes remember its present runs and those it has sent to a process.

    Replaces `TaskPool.flush` of one pool of processes; read in Celery 5.5.0 and 5.7.0.

    When the connection to the broker broke, `Consumer.on_close` calls it to drop the requests that the pool has not
    begun. Celery 5.5 also forgets, in `AsynPool._cache`, the present runs: the worker then does not learn of the end of
    these runs, nor of the death of their process, and they occupy the pool for ever. Celery 5.7 forgets only requests
    that were sent to a process which has not confirmed the beginning; they begin all the same. With ours the pool
    remembers both. If a later Celery forgets them elsewhere, a worker begins fewer runs at a time after each break, and
    runs sent requests again.
    """
    processes = getattr(pool, "_pool", None)
    if hasattr(processes, "_cache"):
        wrap(pool, "flush", partial(_flush, processes))


def _flush(processes: Any, before: Callable[[], None]) -> None:
    known = dict(processes._cache)
    before()
    sent = {number: job for number, job in known.items() if job._accepted or job._write_to}  # or partly sent
    processes._cache.update((number, job) for number, job in sent.items() if not job.ready())


def pause_in_greenlets() -> None:
    """Let bodies continue while kombu pauses.

    Replaces `kombu.utils.functional.sleep`, in a worker with gevent; read in kombu 5.5.2 and 5.7.0.

    `retry_over_time` calls this name of its module between two tries to connect: for up to half a minute if the broker
    is down. When gevent replaces Python's locks, it reads all existing objects, among them Celery's lazy names, which
    import kombu; it replaces `time.sleep` only after that. If a later kombu pauses by another name, all greenlets stand
    still while it connects.
    """
    functional.sleep = time.sleep


ASYNCIO = "asyncio"
POOL = "celery_sidejob.pools.asyncio:TaskPool"


def name_asyncio() -> None:
    """Let `--pool asyncio` be chosen; a second call has no effect.

    Adds a name to those of Celery's pools; read in Celery 5.5.0 and 5.7.0.

    `celery worker --pool` accepts the names in `celery.concurrency.ALIASES`, which it has copied when it was imported.
    If a later Celery keeps them elsewhere, `--pool asyncio` is refused; `worker_pool` with the class's own name still
    works.
    """
    from celery.bin.worker import WORKERS_POOL  # here: only the command has it

    if ASYNCIO not in concurrency.ALIASES:
        concurrency.ALIASES[ASYNCIO] = POOL
        WORKERS_POOL.choices = (*WORKERS_POOL.choices, ASYNCIO)

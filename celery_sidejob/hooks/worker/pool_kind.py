"""The differences of Celery's pools that matter to us: bodies in processes, threads, greenlets, or in the worker."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

from ...model import native
from ...model.errors import SettingsError
from ...model.logger import logger
from ...services.heartbeat.pool_processes import Process
from ..patches import pools

THREADS_END_S = 0.5
"""How long threads of a pool that was told to end may take for it, if no body keeps them."""


def check(pool_cls: Any) -> None:
    """Refuse a pool in which a worker could not keep what it promises: SettingsError says which to take."""
    module = getattr(pool_cls, "__module__", "")
    if module == "celery.concurrency.eventlet":
        raise SettingsError(
            "The pool eventlet is not supported: eventlet is no longer maintained, and psycopg does not know it: a "
            "statement would stop all its green threads. Use --pool=gevent or --pool=threads."
        )
    if module == "celery.concurrency.gevent" and not native.is_patched():
        raise SettingsError(
            "The pool gevent was chosen after Python's threads and sockets had been imported: each statement would "
            "stop all greenlets. Choose it on the command line, with celery -A <app> worker --pool=gevent, and not by "
            "worker_pool."
        )


def has_processes(pool: Any) -> bool:
    """Whether bodies run in processes of their own, which may die alone."""
    return hasattr(getattr(pool, "_pool", None), "_pool")


def processes(pool: Any) -> list[Process]:
    """Return the processes of a prefork pool; other pools have no processes of their own."""
    found = getattr(getattr(pool, "_pool", None), "_pool", None)
    return [process for process in list(found or ()) if getattr(process, "pid", None)]


def concurrency(pool: Any) -> int:
    """Return how many bodies the pool runs at a time at most.

    `num_processes` says so of each pool but gevent's in Celery 5.5, where it is the number of bodies that run now.
    """
    greenlets = getattr(pool, "_pool", None) if getattr(pool, "is_green", False) else None
    return getattr(greenlets, "size", None) or pool.num_processes or 1


def has(pool: Any, request: Any) -> bool:
    """Whether a pool of processes begins a request, or has begun it; for the thread that gives it runs."""
    return any(getattr(job._accept_callback, "__self__", None) is request for job in pool._pool._cache.values())


def is_idle(pool: Any) -> bool:
    """Whether the pool itself has no run, begun or not; for the thread that gives it runs, between two of them."""
    if has_processes(pool):
        return not getattr(pool._pool, "_cache", ())
    return not (getattr(pool, "_pool", None) or getattr(pool, "unfinished", ()))


def not_begun() -> BaseException:
    """Return what a thread or a greenlet of the pool is to raise when there is nothing for it to do after all."""
    if native.is_patched():
        from gevent import GreenletExit

        silent: BaseException = GreenletExit()  # about which gevent says nothing
        return silent
    return RuntimeError("its message was given back")  # which nobody asks the thread's future about


def leave_threads_behind(worker: Any) -> None:
    """Have this process end after a cold stop though bodies go on in threads of its pool: nobody can stop those.

    Python waits for all threads at its end. What these bodies held was given back, and their commits are refused.
    """
    executor = getattr(worker.pool, "executor", None)
    if executor is None:
        return
    executor.shutdown(wait=False, cancel_futures=True)
    threads = list(executor._threads)
    # Before concurrent.futures and threading wait for them; there is no public way to come first.
    threading._register_atexit(lambda: _end_without(threads, worker.exitcode or 0))  # type: ignore[attr-defined]


def _end_without(threads: list[threading.Thread], exitcode: int) -> None:
    deadline = time.monotonic() + THREADS_END_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return
    logger.warning("This worker ends in the middle of bodies, whose runs were given back: threads cannot be stopped.")
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exitcode)


def wait_in_greenlets(pool: Any) -> None:
    """Have Celery wait where greenlets may, if this pool runs them; for the start of a worker."""
    if getattr(pool, "is_green", False):
        pools.pause_in_greenlets()
        _handle_signals_in_greenlets()
        pools.let_messages_wait(pool)


def _handle_signals_in_greenlets() -> None:
    """Have Celery's handlers of stops run where they may wait, as those of a cold and of a soft stop do.

    A signal mostly finds a worker with gevent in its hub, where whatever waits raises.
    """
    from gevent import spawn  # it is there, as the pool is

    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, partial(spawn, handler))

"""The processes in which a worker's bodies run, by its pool: in processes, threads, greenlets, or in the worker itself.

A process of a pool and its worker tell each other things. By memory that they share the worker says that it stops, and
the process on which run it works. With its outcome a run says whether its end is left to the worker. What cuts off a
body in the worker's own process (solo, threads, gevent) ends no process.
"""

from __future__ import annotations

import atexit
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from billiard import current_process
from billiard.exceptions import TimeLimitExceeded
from celery import Celery, signals
from celery.app.task import Context
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.worker import state

from ...model import native
from ...model.crash_points import reach
from ...model.errors import SettingsError
from ...model.logger import logger
from ...pools.coroutines import CutOff, TimeUp
from ...services.heartbeat.deliveries import Deliveries
from ...services.heartbeat.heartbeat import Heartbeat
from ...services.heartbeat.pool_processes import Process
from ...store.connection.turns import share_one
from ...store.results import Ended
from ...store.write_behind import write_all_now
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


def install() -> None:
    """Have processes of pools share a connection, and write at their end what was put off; twice does no harm."""
    signals.worker_process_init.connect(_share_one_connection, weak=False)
    signals.worker_process_shutdown.connect(_write_what_was_put_off, weak=False)


def _share_one_connection(**_: Any) -> None:
    """All threads of the process take turns: what follows the commit of a lent transaction is done by one of its own.

    The signal is sent in the worker's own process too, by pools that have no others.
    """
    if current_process().name != "MainProcess":
        share_one()


def _write_what_was_put_off(**_: Any) -> None:
    """It ends without what Python does at an end."""
    write_all_now()


_LINE = struct.Struct("qqq")
"""A process, the number of its job, and of that job's run."""
PROCESSES = 1024
"""Processes of a pool that have a line; no pool has as many."""
_BOARD = PROCESSES * _LINE.size
"""The bytes of the board; one more says whether the worker stops."""

_shared: mmap.mmap | None = None


def share_memory() -> None:
    """Make the memory that processes of the pool share; the worker's parent calls this before its pool forks."""
    global _shared
    if _shared is None:
        _shared = mmap.mmap(-1, _BOARD + 1)


def announce_stop() -> None:
    """Say that the worker stops. Safe inside a signal handler."""
    if _shared is not None:
        _shared[_BOARD] = 1


def worker_is_stopping() -> bool:
    """Tell whether the worker has begun to stop; False in a spawned pool process, which cannot know."""
    return _shared is not None and _shared[_BOARD] == 1


def write_run(run: tuple[int, int] | None) -> None:
    """Note on the board the run of this process of a pool; None: it works on what its delivery names.

    In a managed queue a delivery is a permit, and only the process that claims learns for which run. It writes the run
    on the board, memory that it shares with its parent, before it runs the body. If the process is killed in between,
    the parent takes the delivery's own run for the one that was in progress, and finds the other in the store.
    """
    line = getattr(current_process(), "index", None)
    if _shared is not None and line is not None and line < PROCESSES:
        _LINE.pack_into(_shared, line * _LINE.size, os.getpid() if run is not None else 0, *(run or (0, 0)))


def runs_on_board() -> dict[int, tuple[int, int]]:
    """Return the runs that are on the board, by process."""
    lines = () if _shared is None else _LINE.iter_unpack(_shared[:_BOARD])
    return {pid: (job_id, run_no) for pid, job_id, run_no in lines if pid}


_TOLD: ContextVar[list[Any] | None] = ContextVar("celery_sidejob_told", default=None)
"""The facts for the worker about the run that is traced here: the run's name and its result, once it is over."""


def leave_end(over: Ended, point: str) -> bool:
    """Leave the end of a run to its worker: the body has ended well, and nothing follows it but its result, if any.

    False if no worker waits for it, as in a test that runs a task by itself. `point`: the crash point before any end.
    """
    told = _TOLD.get()
    if told is None:
        return False
    reach(point)
    told.append(over)
    return True


def trace_leaving(by: Callable[..., Any], *args: Any, **options: Any) -> Sequence[Any]:
    """Run a task `by` Celery's tracer; return its result, and the name of a run whose end was left to the worker.

    If the process dies before the worker has this, the run is lost.
    """
    told: list[Any] = []
    with native.within(_TOLD, told):
        return (*by(*args, **options), *told)


def is_to_stop(app: Celery, key: tuple[Any, int], *, place: int = 0) -> bool:
    """Whether a body should come to its end: its worker stops, or its run was ended or lost, as far as is known here.

    A body in a thread cannot be stopped from outside; it can only look.
    """
    runs = runs_beside(app, key, place)
    return worker_is_stopping() or (runs is not None and runs.is_over(key))


def is_left(app: Celery, key: tuple[Any, int], error: BaseException, *, place: int = 0) -> bool:
    """Whether the body has left its process, by `sys.exit()` for one, which yet goes on and gives nothing back.

    Not if the worker made it leave, because it stops or the run was revoked: then the worker sees to the run.
    """
    runs = runs_beside(app, key, place)
    if runs is None or worker_is_stopping() or isinstance(error, WorkerShutdown | WorkerTerminate):
        return False
    unasked = runs.plan_of(key) is None and not runs.is_over(key)
    return unasked and (isinstance(error, SystemExit) or is_kill(error))


def ident(app: Celery, *, place: int = 0) -> str | None:
    """Return the name of the worker whose bodies run in this process, in the store at this place."""
    heartbeat = _heartbeat(app, place)
    return None if heartbeat is None else heartbeat.ident


def is_revoked(app: Celery, task_id: str | None) -> bool:
    """Whether the asking was revoked while its delivery waited for a thread, where Celery no longer looks."""
    return _heartbeat(app) is not None and task_id in state.revoked


def is_kill(error: BaseException) -> bool:
    """Whether somebody kills this greenlet, or cancels this coroutine for good."""
    return (isinstance(error, CutOff) and not isinstance(error, TimeUp)) or _is_a(error, "greenlet", "GreenletExit")


def limit(error: BaseException, app: Celery, task: Any, request: Context) -> TimeLimitExceeded | None:
    """Return the hard time limit that has struck, if `error` is how a pool without processes tells a body of it."""
    if isinstance(error, TimeUp):
        return TimeLimitExceeded(error.seconds)
    if not _is_a(error, "gevent.timeout", "Timeout"):
        return None
    seconds = (request.timelimit or (None, None))[0] or task.time_limit or app.conf.task_time_limit
    return TimeLimitExceeded(seconds) if seconds and error.seconds == seconds else None  # type: ignore[attr-defined]


def runs_beside(app: Celery, key: tuple[Any, int], place: int = 0) -> Deliveries[Any] | None:
    """Return the runs that this worker knows in one store, if bodies run beside its heartbeat, not in other processes.

    They are of the kind of this run, whose key has a job's number or a task's id.
    """
    heartbeat = _heartbeat(app, place)
    if heartbeat is None:
        return None
    return heartbeat.tasks.runs if isinstance(key[0], str) else heartbeat.runs


def _heartbeat(app: Celery, place: int = 0) -> Heartbeat | None:
    """Return this worker's heartbeat in one store, if bodies run beside it."""
    found: Sequence[Heartbeat] = app.sidejob.heartbeats
    return None if not found or found[0].has_processes else found[place]


def _is_a(error: BaseException, module: str, name: str) -> bool:
    """`isinstance`, without importing what may not be installed."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(error).__mro__)

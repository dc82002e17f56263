"""A pool that runs bodies of `async def` in one event loop: `celery worker --pool asyncio --concurrency 1000`.

It is for any Celery app. Bodies of `async def` run concurrently, as many as `--concurrency` says; other bodies run in
threads beside them, at most `sidejob_sync_threads`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery._state import _task_stack
from celery.concurrency import thread

from ..model.settings import Settings
from .body import GRACE_S, CutOff, TimeUp, make_task
from .coroutines import is_asynchronous, let_run
from .delivery import Delivery, owner
from .standing import Watch

COLLECTED_AFTER = 20_000
"""The least first threshold of the garbage collector; an application may set a greater one.

With greater ones for the older generations too it took no less time, and a worker kept 180 MB more of garbage.
"""
FIRST_NUMBER = 1 << 32
"""Bodies in the loop have numbers beyond those of processes, which Celery asks for."""


class TaskPool(thread.TaskPool):
    """The pool, which begins bodies that are no coroutines as Celery's pool of threads does.

    Its public methods are for the worker's own thread.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.executor._max_workers = min(self.limit, _sync_threads(self.app))
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run_loop, name="celery_sidejob asyncio", daemon=True)
        self._watch = Watch(self._loop, self._thread)
        self._numbers = itertools.count(FIRST_NUMBER)
        self._waiting: deque[tuple[Delivery, Callable[[], None]]] = deque()
        self._running: dict[int, Delivery] = {}
        self._futures: set[Future[Any]] = set()

    @property
    def stood(self) -> tuple[float, str] | None:
        """When the loop last stood still, by the clock `time.monotonic`, and where."""
        return self._watch.stood

    def on_start(self) -> None:
        """Begin the loop, and prepare all tasks for it."""
        super().on_start()
        _task_stack.__ident_func__ = owner
        for task in self.app.tasks.values():
            self._prepare(task)
        _collect_seldom()
        self._thread.start()
        self._watch.start()

    def on_apply(
        self, target: Callable[..., Any], args: Any = None, kwargs: Any = None, **options: Any
    ) -> thread.ApplyResult:
        """Run a request in the loop if its body is a coroutine, otherwise in a thread."""
        task = self.app.tasks.get(args[0])
        if task is None or not is_asynchronous(task):
            return super().on_apply(target, args, kwargs, **options)
        number = next(self._numbers)
        trace = partial(_trace, partial(target, *args, **(kwargs or {})), number, options)
        delivery = Delivery(trace, number)
        future: Future[Any] = Future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        self._loop.call_soon_threadsafe(self._admit, delivery, partial(self._begin, delivery, future, options))
        return _Result(future)

    def grow(self, n: int = 1) -> None:
        """Run more bodies at once."""
        self.limit += n
        self._tell_loop(self._admit_waiting)

    def shrink(self, n: int = 1) -> None:
        """Run fewer bodies at once, when some are over."""
        self.limit -= n

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Cancel a body that the loop runs; a thread cannot be stopped."""
        if pid == os.getpid():
            super().terminate_job(pid, signal)
        self._tell_loop(self._cut, pid)

    def on_stop(self) -> None:
        """Wait for all bodies that have begun; the others are the broker's still."""
        self._tell_loop(self._forget_waiting)
        super().on_stop()
        while self._futures:
            wait(list(self._futures), timeout=1)
        self._end_loop()

    def on_terminate(self) -> None:
        """Cancel all bodies of the loop, and wait a moment for what they do then."""
        self._tell_loop(self._cut_all)
        wait(list(self._futures), timeout=GRACE_S)
        self._end_loop()

    def _get_info(self) -> dict[str, Any]:
        return {**super()._get_info(), "running": len(self._running)}

    # -- in the loop's thread --------------------------------------------------------------------------------------

    def _admit(self, delivery: Delivery, begin: Callable[[], None]) -> None:
        self._waiting.append((delivery, begin))
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < self.limit:
            delivery, begin = self._waiting.popleft()
            self._running[delivery.number] = delivery
            begin()

    def _begin(self, delivery: Delivery, future: Future[Any], options: dict[str, Any]) -> None:
        if not future.set_running_or_notify_cancel():
            del self._running[delivery.number]
            return
        timers = self._timers(delivery, options.get("timeout_callback"), options)
        task = self._loop.create_task(delivery.go())
        task.add_done_callback(partial(self._over, delivery, future, timers, options.get("timeout_callback")))

    def _timers(self, delivery: Delivery, tell: Any, options: dict[str, Any]) -> list[asyncio.TimerHandle]:
        soft, hard = (options.get(name) or self.options.get(name) for name in ("soft_timeout", "timeout"))
        timers = []
        if soft:
            timers.append(self._loop.call_later(soft, self._limit, delivery, soft, tell))
        if hard:
            timers.append(self._loop.call_later(hard, delivery.cut, TimeUp(hard)))
        return timers

    def _limit(self, delivery: Delivery, seconds: float, tell: Any) -> None:
        tell(True, seconds)
        delivery.limit(seconds)

    def _over(
        self,
        delivery: Delivery,
        future: Future[Any],
        timers: list[asyncio.TimerHandle],
        tell: Any,
        task: asyncio.Task[Any],
    ) -> None:
        for timer in timers:
            timer.cancel()
        del self._running[delivery.number]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        try:
            if isinstance(error, TimeUp):
                tell(False, error.seconds)
        finally:
            if error is None or isinstance(error, CutOff):
                future.set_result(None)
            else:
                future.set_exception(error)
            self._admit_waiting()

    def _cut(self, pid: int) -> None:
        if pid in self._running:
            self._running[pid].cut(CutOff("it was revoked, or its worker stops"))

    def _cut_all(self) -> None:
        self._forget_waiting()
        for pid in list(self._running):
            self._cut(pid)

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        for future in list(self._futures):
            future.cancel()  # unless it runs

    # -- the loop --------------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(make_task)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _end_loop(self) -> None:
        self._watch.stop()
        self._tell_loop(self._loop.stop)
        self._thread.join(GRACE_S)

    def _tell_loop(self, call: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # it is closed: Celery ends a pool twice at a cold stop
            self._loop.call_soon_threadsafe(call, *args)

    def _prepare(self, task: Any) -> None:
        let_run(task)
        task.request_stack.__ident_func__ = owner


class _Result(thread.ApplyResult):
    """What Celery gets for a request; it calls `terminate` where it has called `terminate_job` just before."""

    def terminate(self, signal: Any) -> None:
        """Do nothing."""


def _trace(target: Callable[[], Any], number: int, options: dict[str, Any]) -> None:
    """Run Celery's tracer, and tell the request of its outcome or of an error outside of the tracer."""
    options["accept_callback"](number, time.monotonic())
    try:
        outcome = target()
    except CutOff:
        raise
    except BaseException as error:
        if not isinstance(error, Exception):  # it would have ended a process of a pool
            error = WorkerLostError(repr(error)).with_traceback(error.__traceback__)
        options["error_callback"](ExceptionInfo((type(error), error, error.__traceback__)))
    else:
        options["callback"](outcome)


def _collect_seldom() -> None:
    """Have the garbage collector pass over what is loaded by now, and look less often at what thousands of bodies have.

    As Python sets it, it looks at all that is alive several times a thousand tasks: a fifth of the worker's time.
    """
    gc.collect()
    gc.freeze()
    given, *others = gc.get_threshold()
    gc.set_threshold(given and max(given, COLLECTED_AFTER), *others)  # 0: an application wants none


def _sync_threads(app: Any) -> int:
    if hasattr(app, "sidejob"):
        return int(app.sidejob.settings.sync_threads)
    return int(app.conf.get("sidejob_sync_threads") or Settings.sync_threads)  # nothing else of ours is in this app


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop

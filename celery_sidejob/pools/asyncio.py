"""A pool that runs bodies of `async def` in one event loop: `celery worker --pool asyncio --concurrency 1000`.

It is for any Celery app. Bodies of `async def` run concurrently, as many as `--concurrency` says; other bodies run in
threads beside them, at most `sidejob_sync_threads`.

Celery's tracer is synchronous, and calls the body as a function. So each delivery has a greenlet for the tracer, and
the coroutine is driven in that greenlet: whatever the coroutine awaits goes to the greenlet of the loop's task, which
awaits it, and comes back with the value. So `asyncio.current_task()` and `asyncio.timeout()` in the body see the loop's
task, and what Celery keeps for each greenlet (`task.request`, the current task) is the body's. SQLAlchemy's
`greenlet_spawn` does the same.

A loop that stands still is noticed by a thread, which names the line that keeps it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery._state import _task_stack
from celery.concurrency import thread

from ..awaiting import in_thread
from ..model.errors import MissingLibraryError
from ..model.logger import logger
from ..model.settings import Settings
from .coroutines import GRACE_S, Body, CutOff, TimeUp, driver, is_asynchronous, let_run, make_task

try:
    from greenlet import getcurrent, greenlet
except ImportError as error:
    raise MissingLibraryError(
        'The pool asyncio needs greenlet: pip install "celery-sidejob[asyncio]", or choose another pool.'
    ) from error

COLLECTED_AFTER = 20_000
"""The least first threshold of the garbage collector; an application may set a greater one.

With greater ones for the older generations too it took no less time, and a worker kept 180 MB more of garbage.
"""
FIRST_NUMBER = 1 << 32
"""Bodies in the loop have numbers beyond those of processes, which Celery asks for."""
LONGEST_S = 1.0
"""The longest time for which the loop may stand still unnoticed."""
BEAT_S = 0.25

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")


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
        self._waiting: deque[Delivery] = deque()
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
            let_run(task)
            task.request_stack.__ident_func__ = owner
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
        delivery = Delivery(partial(target, *args, **(kwargs or {})), next(self._numbers), options)
        self._futures.add(delivery.future)
        delivery.future.add_done_callback(self._futures.discard)
        self._loop.call_soon_threadsafe(self._admit, delivery)
        return _Result(delivery.future)

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

    def _admit(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._running) < self.limit:
            delivery = self._waiting.popleft()
            if delivery.future.set_running_or_notify_cancel():
                self._begin(delivery)

    def _begin(self, delivery: Delivery) -> None:
        self._running[delivery.number] = delivery
        soft, hard = (delivery.options.get(name) or self.options.get(name) for name in ("soft_timeout", "timeout"))
        timers = []
        if soft:
            timers.append(self._loop.call_later(soft, delivery.limit, soft))
        if hard:
            timers.append(self._loop.call_later(hard, delivery.cut, TimeUp(hard)))
        self._loop.create_task(delivery.go()).add_done_callback(partial(self._over, delivery, timers))

    def _over(self, delivery: Delivery, timers: list[asyncio.TimerHandle], task: asyncio.Task[Any]) -> None:
        for timer in timers:
            timer.cancel()
        del self._running[delivery.number]
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        try:
            if isinstance(error, TimeUp):
                delivery.options["timeout_callback"](False, error.seconds)
        finally:
            if error is None or isinstance(error, CutOff):
                delivery.future.set_result(None)
            else:
                delivery.future.set_exception(error)
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


class _Result(thread.ApplyResult):
    """What Celery gets for a request; it calls `terminate` where it has called `terminate_job` just before."""

    def terminate(self, signal: Any) -> None:
        """Do nothing."""


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


def owner() -> Any:
    """Return whose stacks Celery is to use here: a delivery's, or a greenlet's as elsewhere."""
    return driver.get() or getcurrent()


class Delivery:
    """A run of the tracer in the loop. All methods are for the loop's thread."""

    def __init__(self, target: Callable[[], Any], number: int, options: dict[str, Any]) -> None:
        self.number = number
        """What Celery takes for the number of its process."""
        self.options = options
        """What Celery gives to `on_apply` with a request: its time limits, and the functions that tell it of a run."""
        self.future: Future[Any] = Future()
        self._target = target
        self._greenlet: Any = None
        self._body: Body | None = None

    async def go(self) -> Any:
        """Run the tracer; raises what it raises."""
        driver.set(self)
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        self._greenlet = greenlet(self._trace, getcurrent())
        self._greenlet.gr_context = getcurrent().gr_context  # one context: what the body sets, its task sees
        awaited = self._greenlet.switch()
        while not self._greenlet.dead:
            try:
                value = yield awaited
            except BaseException as error:
                awaited = self._greenlet.throw(error)
            else:
                awaited = self._greenlet.switch(value)
        return awaited

    def _trace(self) -> None:
        """Run Celery's tracer, and tell the request of its outcome or of an error outside of the tracer."""
        self.options["accept_callback"](self.number, time.monotonic())
        try:
            outcome = self._target()
        except CutOff:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):  # it would have ended a process of a pool
                error = WorkerLostError(repr(error)).with_traceback(error.__traceback__)
            self.options["error_callback"](ExceptionInfo((type(error), error, error.__traceback__)))
        else:
            self.options["callback"](outcome)

    def limit(self, seconds: float) -> None:
        """Tell the request of its soft time limit, and raise SoftTimeLimitExceeded in a body that is in progress."""
        self.options["timeout_callback"](True, seconds)
        if self._body is not None:
            self._body.limit(seconds)

    def cut(self, reason: CutOff) -> None:
        """Cancel the body for good, if it is in progress."""
        if self._body is not None:
            self._body.cut(reason)

    def is_here(self) -> bool:
        """Tell whether this is the tracer's greenlet; what the body has made runs in the loop's, or a thread."""
        return getcurrent() is self._greenlet

    def run(self, body: Body) -> Any:
        """Run a body in the tracer's greenlet, while the loop goes on."""
        outer, self._body = self._body, self._body or body  # within a body: of a task that it applies
        try:
            return self._run(body)
        finally:
            self._body = outer

    @property
    def computes(self) -> bool:
        """Whether the body's own code is in progress; within it a task that it applies has none of its own."""
        return self._body is not None and self._body.computes

    def elsewhere(self, work: Callable[[], Any]) -> Any:
        """Do work in another thread, while the loop goes on; nothing interrupts it."""
        return self._run(in_thread(work))

    def _run(self, awaitable: Awaitable[Any]) -> Any:
        steps, parent = awaitable.__await__(), self._greenlet.parent
        try:
            awaited = next(steps)
            while True:
                try:
                    value = parent.switch(awaited)
                except BaseException as error:
                    awaited = steps.throw(error)
                else:
                    awaited = steps.send(value)
        except StopIteration as stop:
            return stop.value


class Watch:
    """A thread that watches the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._watched = thread
        self._moved_at = time.monotonic()
        self.stood: tuple[float, str] | None = None
        """When the loop last stood still, by the clock `time.monotonic`, and where."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="celery_sidejob watch", daemon=True)

    def start(self) -> None:
        """Begin; in any thread."""
        self._loop.call_soon_threadsafe(self._beat)
        self._thread.start()

    def stop(self) -> None:
        """End; in any thread."""
        self._is_over.set()

    def _beat(self) -> None:
        self._moved_at = time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        told_of = 0.0
        while not self._is_over.wait(BEAT_S):
            moved_at = self._moved_at
            still_s = time.monotonic() - moved_at
            if still_s > LONGEST_S + BEAT_S and told_of != moved_at:
                told_of = moved_at
                self._tell(still_s)

    def _tell(self, still_s: float) -> None:
        frame = sys._current_frames().get(self._watched.ident or 0)
        if frame is None:
            return
        where = _own_code(frame)
        code = where.f_code
        place = f"{_task_of(frame)} is in {code.co_name}, line {where.f_lineno} of {code.co_filename}"
        self.stood = time.monotonic(), place
        logger.warning(
            "The event loop of this worker has stood still for %.1f s: %s. All its bodies wait meanwhile. Await what "
            "takes long there, or run it by asyncio.to_thread().",
            still_s,
            place,
        )


def _own_code(innermost: FrameType) -> FrameType:
    """Return the innermost frame that is of no library: its author can change it."""
    frames = (frame for frame, _ in walk_stack(innermost))
    return next((frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)), innermost)


def _task_of(innermost: FrameType) -> str:
    for frame, _ in walk_stack(innermost):
        if frame.f_code is Body._drive.__code__:
            body: Body = frame.f_locals["self"]
            return body.name
    return "a task of asyncio, or Celery itself,"

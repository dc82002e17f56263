"""Coroutines run to their end from synchronous code: as Celery's tracer calls the body of a task.

A body in progress may be interrupted where it awaits, or cut off.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import TYPE_CHECKING, Any

from billiard import pool as processes
from celery import current_task
from celery.app.task import Task
from celery.exceptions import SoftTimeLimitExceeded

from ..model import native
from ..model.errors import SettingsError
from ..model.logger import logger

if TYPE_CHECKING:
    from .asyncio import Delivery  # it needs greenlet, which other pools do not


driver: ContextVar[Delivery | None] = ContextVar("celery_sidejob_driver", default=None)
"""The delivery to which the code in progress belongs, if its pool runs coroutines in one event loop.

Tasks and threads that a body has made belong to it too. It lets the loop go on while it runs a coroutine.
"""


class _Thread(threading.local):
    runner: asyncio.Runner | None = None


_thread = _Thread()


def _after_fork() -> None:
    _thread.runner = None  # its loop is the parent's


os.register_at_fork(after_in_child=_after_fork)


def is_coroutine_function(function: Any) -> bool:
    """Tell whether a call returns a coroutine, also through decorators that keep what they wrap."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, and return its value.

    In the pool `asyncio` other bodies go on meanwhile. Elsewhere the thread has an event loop of its own, which it
    keeps: clients that are bound to a loop can be shared by all bodies of a thread.
    """
    body = Body(coroutine, _name())
    here = driver.get()
    if here is not None and here.is_here():
        return here.run(body)
    if native.is_patched():
        coroutine.close()
        raise SettingsError(
            f"The body of {body.name} is an async def, which the pool gevent cannot run: its greenlets would share one "
            "event loop. Start a worker with --pool=asyncio, or with prefork, threads or solo."
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _in_own_loop(body)
    with ThreadPoolExecutor(1) as thread:  # this one has a loop, which stands still meanwhile
        return thread.submit(copy_context().run, asyncio.run, _whole(body)).result()


def elsewhere() -> Callable[[Callable[[], Any]], Any] | None:
    """Return what does work in another thread, if this is Celery's code around a body in the pool `asyncio`.

    Not in the body's own code, which expects that nothing else goes on before it awaits.
    """
    here = driver.get()
    return here.elsewhere if here is not None and here.is_here() and not here.computes else None


def _name() -> str:
    if not current_task:
        return "a coroutine"
    return f"{current_task.name}[{current_task.request.id}]"


async def _whole(body: Body) -> Any:
    return await body


def _in_own_loop(body: Body) -> Any:
    if _thread.runner is None:
        _thread.runner = asyncio.Runner()
        _thread.runner.get_loop().set_task_factory(make_task)
    with _soft_limits(_thread.runner.get_loop(), body):
        return _thread.runner.run(_whole(body), context=copy_context())


@contextmanager
def _soft_limits(loop: asyncio.AbstractEventLoop, body: Body) -> Iterator[None]:
    """Let the soft time limit of a pool process strike in the body, and not in the midst of its event loop.

    The limit is a signal, whose handler raises wherever the process is. While the body computes that is right.
    """
    number = processes.SIG_SOFT_TIMEOUT
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number) if is_main and number is not None else None
    if before is not processes.soft_timeout_sighandler:
        yield
        return

    def strike(signum: int, frame: Any) -> None:
        if body.computes:
            before(signum, frame)
        loop.call_soon_threadsafe(body.limit)  # wakes the loop, which may wait

    signal.signal(number, strike)
    try:
        yield
    finally:
        signal.signal(number, before)


def is_asynchronous(task: Task) -> bool:
    """Tell whether the task's body is an `async def`."""
    return is_coroutine_function(_body_of(task))


def let_run(task: Task) -> None:
    """Let a call of the task by Celery run its `async def` to the end; a second call has no effect.

    A call of your own, `await add(2, 3)`, still gets the coroutine. The body lies inside of what Celery wraps around it
    for `autoretry_for`, which is to see its errors.
    """
    body = _body_of(task)
    if hasattr(body, "runs_coroutine") or not is_coroutine_function(body):
        return

    @wraps(body)
    def run_to_end(*args: Any, **kwargs: Any) -> Any:
        coroutine = body(*args, **kwargs)
        return coroutine if task.request.called_directly else run(coroutine)

    run_to_end.runs_coroutine = True  # type: ignore[attr-defined]
    setattr(task, "_orig_run" if hasattr(task, "_orig_run") else "run", run_to_end)


def _body_of(task: Task) -> Any:
    return getattr(task, "_orig_run", task.run)  # without the wrapper of autoretry_for


class CutOff(BaseException):
    """The body is not to go on: its task was revoked, or its worker stops."""


class TimeUp(CutOff):
    """The hard time limit has struck."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"its time limit of {seconds:g} s")
        self.seconds = seconds


GRACE_S = 5.0
"""How long a body that was cut off, and the tasks that it leaves behind, may take to clean up."""


class SoftLimit(SoftTimeLimitExceeded, asyncio.CancelledError):
    """A soft time limit inside of a body: what asyncio does at a cancellation (in a TaskGroup) it does at this."""


class Body:
    """One coroutine, driven in a task of an event loop. All methods are for the loop's thread."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        self.name = name
        self.cut_off: CutOff | None = None
        self.computes = False
        """Whether its own code is in progress: neither it nor its thread waits, nor does another task run."""
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None
        self._children: set[asyncio.Task[Any]] = set()
        self._to_raise: BaseException | None = None
        self._is_given_up = False

    def __await__(self) -> Generator[Any, Any, Any]:
        """Run it to its end in the present task, and cancel what it leaves behind."""
        self._task = asyncio.current_task()
        token = _present.set(self)
        try:
            return (yield from self._drive())
        except SoftLimit as limit:
            raise SoftTimeLimitExceeded(*limit.args).with_traceback(limit.__traceback__) from None
        except asyncio.CancelledError as error:
            if self.cut_off is None:
                raise RuntimeError("The body of the task was cancelled, by itself or by what it awaited") from error
            raise
        finally:
            _present.reset(token)
            self._task = None  # nothing interrupts it any more
            yield from self._end_children().__await__()
            if self.cut_off is not None:
                raise self.cut_off

    def limit(self, *seconds: float) -> None:
        """Raise SoftTimeLimitExceeded in it, where it awaits."""
        if self._task is not None and self.cut_off is None:
            self._interrupt(SoftLimit(*seconds))

    def cut(self, reason: CutOff) -> None:
        """Cancel it for good. If it goes on all the same, it is given up after a while."""
        if self._task is not None and self.cut_off is None:
            self.cut_off = reason
            self._interrupt(asyncio.CancelledError(str(reason)))
            self._task.get_loop().call_later(GRACE_S, self._give_up)

    def _give_up(self) -> None:
        if self._task is not None:
            self._is_given_up = True
            self._task.cancel()

    def _interrupt(self, error: BaseException) -> None:
        assert self._task is not None
        self._to_raise = error
        self._task.cancel()

    def _drive(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            self.computes = True
            try:
                awaited = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self.computes = False
            value = error = None
            try:
                value = yield awaited
            except BaseException as raised:
                error = raised
            error = self._interruption() or error

    def _interruption(self) -> BaseException | None:
        """Return what is to be raised in it now, whatever came of its await, which may have heeded no cancellation."""
        if self._is_given_up:
            logger.error("%s went on after it was cancelled (%s), and is given up", self.name, self.cut_off)
            with suppress(RuntimeError):  # it awaits even now
                self._coroutine.close()
            raise asyncio.CancelledError
        error, self._to_raise = self._to_raise, None
        if isinstance(error, SoftLimit):
            assert self._task is not None
            self._task.uncancel()
        return error

    def _adopt(self, task: asyncio.Task[Any]) -> None:
        self._children.add(task)
        task.add_done_callback(self._children.discard)

    async def _end_children(self) -> None:
        children = {task for task in self._children if not task.done()}
        if not children:
            return
        if self.cut_off is None:
            logger.warning("%s has left %d tasks of its own behind, which are cancelled", self.name, len(children))
        for task in children:
            task.cancel()
        await asyncio.wait(children, timeout=GRACE_S)


_present: ContextVar[Body | None] = ContextVar("celery_sidejob_body", default=None)
"""The body to which the code in progress belongs, or which has made the task or thread of that code."""


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Make a task, and have it end with the body that makes it at the latest: a loop's task factory."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    body = _present.get()
    if body is not None:
        body._adopt(task)
    return task

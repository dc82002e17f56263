"""Coroutines run to their end from synchronous code: as Celery's tracer calls the body of a task."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import TYPE_CHECKING, Any

from billiard import pool as processes
from celery import current_task
from celery.app.task import Task

from ..model import native
from ..model.errors import SettingsError
from .body import Body, make_task

if TYPE_CHECKING:
    from .delivery import Delivery  # it needs greenlet, which other pools do not


driver: ContextVar[Delivery | None] = ContextVar("celery_sidejob_driver", default=None)
"""The delivery in progress here, if its pool runs coroutines in one event loop: it lets that go on meanwhile."""


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

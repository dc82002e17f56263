"""A coroutine in progress as the body of a task, which may be interrupted where it awaits, or cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from ..model.logger import logger


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

"""One delivery in the pool `asyncio`: Celery's tracer in a greenlet, whose body lets the event loop go on.

The tracer is synchronous, and calls the body as a function. The coroutine that it gets is driven in the tracer's own
greenlet: whatever the coroutine awaits goes to the greenlet of the loop's task, which awaits it, and comes back with
the value. So `asyncio.current_task()` and `asyncio.timeout()` in the body see the loop's task, and what Celery keeps
for each greenlet (`task.request`, the current task) is the body's. SQLAlchemy's `greenlet_spawn` does the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import Any

from ..awaiting import in_thread
from ..model.errors import MissingLibraryError
from . import coroutines
from .body import Body, CutOff

try:
    from greenlet import getcurrent, greenlet
except ImportError as error:
    raise MissingLibraryError(
        'The pool asyncio needs greenlet: pip install "celery-sidejob[asyncio]", or choose another pool.'
    ) from error

present: ContextVar[Delivery | None] = ContextVar("celery_sidejob_delivery", default=None)
"""The delivery to which the code in progress belongs: the body, and the tasks and threads that it has made."""


def owner() -> Any:
    """Return whose stacks Celery is to use here: a delivery's, or a greenlet's as elsewhere."""
    return present.get() or getcurrent()


class Delivery:
    """A run of the tracer in the loop. All methods are for the loop's thread."""

    def __init__(self, trace: Callable[[], Any], number: int) -> None:
        self.number = number
        """What Celery takes for the number of its process."""
        self._trace = trace
        self._greenlet: Any = None
        self._body: Body | None = None

    async def go(self) -> Any:
        """Run the tracer; raises what it raises."""
        present.set(self)
        coroutines.driver.set(self)
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

    def limit(self, seconds: float) -> None:
        """Raise SoftTimeLimitExceeded in the body, if it is in progress."""
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

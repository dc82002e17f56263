"""Callers that wait for results, in a thread or a coroutine of their own, for what the process's ear hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from celery import states
from celery.app.task import Task
from celery.backends.asynchronous import BaseResultConsumer, Drainer
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import ResultBase, ResultSet

from ..awaiting import Each, Item, Items, ask, each, in_thread, wait_until, whole
from ..model.errors import StoreUnavailableError
from .ear import Wait

INTERVAL_S = 1.0
"""How often a caller that waits calls its `on_interval`, as with Celery's other backends that do not poll."""
SHORTEST_LOOK_S = 1.0
"""The time that a look has for its answer if the caller's timeout leaves less: with `timeout=0` it looks once."""
LATE = "The operation timed out."


class ResultConsumer(BaseResultConsumer):  # type: ignore[misc]
    """Resolves results in the thread of the caller that waits for them; there it also calls `on_message`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drainer = Drainer(self)  # whatever the environment: nothing is to be drained in between

    def _wait_for_pending(
        self,
        result: Any,
        timeout: float | None = None,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[[Any], Any] | None = None,
        **_: Any,
    ) -> Iterator[None]:
        """Yield each time that results may have been resolved, until this one is; TimeoutError after `timeout`."""
        yield from each(self.waiting(result, timeout, on_interval, on_message))

    def waiting(
        self,
        result: Any,
        timeout: float | None = None,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[[Any], Any] | None = None,
    ) -> Items:
        """Do this in parts."""
        deadline = inf if timeout is None else monotonic() + timeout
        ear, parts = self.backend.place.ear, _Parts(self, result, on_message, deadline)
        if not ear.listens:  # a result that is there needs no session
            yield parts.look
            yield Item(None)
        if result.on_ready.ready:
            return
        with ExitStack() as block:
            yield partial(block.enter_context, ear.waiting(parts.wait, deadline))
            yield parts.look
            while True:
                yield Item(None)
                if result.on_ready.ready or not parts.wait.keys:
                    return
                left_s = min(INTERVAL_S, deadline - monotonic())
                if left_s <= 0:
                    raise CeleryTimeoutError(LATE)
                parts.resolve((yield _Come(parts.wait, left_s)))
                if on_interval is not None:
                    yield on_interval


@dataclass(frozen=True, slots=True)
class _Come:
    """A part that returns what has come for a caller, after some seconds at the latest."""

    wait: Wait
    seconds: float

    def __call__(self) -> list[tuple[str, bytes]]:
        return [*self.wait.take(self.seconds)]

    async def awaited(self) -> list[tuple[str, bytes]]:
        """Return it, and let the event loop go on until then."""
        loop, come = asyncio.get_running_loop(), asyncio.Event()
        self.wait.told = partial(_tell, loop, come)
        found = [*self.wait.take(0.0)]
        if not found:
            with suppress(TimeoutError):
                await asyncio.wait_for(come.wait(), self.seconds)
            found = [*self.wait.take(0.0)]
        return found


def _tell(loop: asyncio.AbstractEventLoop, come: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(come.set)


class _Parts:
    """The results of single tasks that one call waits for."""

    def __init__(
        self, consumer: ResultConsumer, result: Any, on_message: Callable[[Any], Any] | None, deadline: float
    ) -> None:
        self._deadline = deadline
        self._backend, self._buckets, self._on_message = consumer.backend, consumer.buckets, on_message
        self._parts: dict[str, list[Any]] = {}
        for part in _unresolved(result):
            self._parts.setdefault(self._backend.get_key_for_task(part.id), []).append(part)
        self.wait = Wait(self._parts)

    def look(self) -> None:
        """Resolve those whose results are kept; TimeoutError if the store has not answered by the deadline."""
        keys, until = list(self.wait.keys), max(self._deadline, monotonic() + SHORTEST_LOOK_S)

        def read() -> Mapping[str, bytes]:
            try:
                found: Mapping[str, bytes] = self._backend.mget(keys, until=until)
            except StoreUnavailableError as error:
                if monotonic() < until:
                    raise
                raise CeleryTimeoutError(LATE) from error
            return found

        self.wait.hand_over(self._backend.again("A wait for results", read, until=until))
        self.resolve(self.wait.take(0.0))

    def resolve(self, come: Iterable[tuple[str, bytes]]) -> None:
        """Resolve those whose results have come."""
        for key, body in come:
            if key in self.wait.keys and self._resolve(self._parts[key], self._backend.decode_result(body)):
                self.wait.keys.pop(key, None)

    def _resolve(self, parts: list[Any], meta: Mapping[str, Any]) -> bool:
        """Give a state to the results of one task; tell whether it is the last one."""
        if self._on_message is not None:
            self._on_message(meta)
        if meta["status"] not in states.READY_STATES:
            return False
        for part in parts:
            part._maybe_set_cache(meta)
            bucket = self._buckets.pop(part, None)
            if bucket is not None:
                bucket.append(part)
        return True


def _unresolved(result: Any) -> Iterator[Any]:
    """Yield the results of single tasks that a result consists of, and that are not known yet."""
    if isinstance(result, ResultSet):
        for part in result.results:
            yield from _unresolved(part)
    elif hasattr(result, "_cache") and not result._cache:
        yield result


def add_awaited_calls() -> None:
    """Give Celery's classes the calls that a coroutine awaits; they have no such methods. Twice does no harm."""
    Task.adelay, Task.aapply_async, ResultBase.aget = adelay, aapply_async, aget


async def adelay(self: Task, *args: Any, **kwargs: Any) -> Any:
    """Call the task as `delay` does, while the event loop goes on."""
    return await in_thread(partial(self.delay, *args, **kwargs))


async def aapply_async(self: Task, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
    """Call the task as `apply_async` does; `transaction=` may be asynchronous."""
    return await ask(self.apply_async, args, kwargs, **options)


async def aget(self: ResultBase, timeout: float | None = None, propagate: bool = True, **options: Any) -> Any:
    """Wait for the result and return it, as `get` does; also in a task, whose pool goes on.

    With ``sidejobpg://`` the wait is told of the result, with another backend it looks up to four times a second.
    """
    follows = propagate and options.get("follow_parents", True) and getattr(self, "parent", None) is not None
    look_at_parents = getattr(self, "_maybe_reraise_parent_error", None) if follows else None

    def is_ready() -> bool:
        if look_at_parents is not None:
            look_at_parents()
        return bool(self.ready())

    consumer = getattr(getattr(self, "backend", None), "result_consumer", None)
    if isinstance(consumer, ResultConsumer):
        async for _ in Each(consumer.waiting(self, timeout, look_at_parents)):
            pass
    elif not await whole(wait_until(is_ready, timeout)):
        raise CeleryTimeoutError(LATE)
    return await in_thread(partial(self.get, propagate=propagate, disable_sync_subtasks=False, **options))

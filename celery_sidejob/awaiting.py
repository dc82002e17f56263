"""Verbs of handles as coroutines: `await job.aio.run()` does what `job.run()` does, while the event loop goes on.

A verb stands once, and is synchronous: the coroutine calls it in a thread, with the caller's context. What must not
keep a thread for long is written as `Parts`: a generator that yields each call that may block, and gets its value.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .model.checks import MOST_S, is_near, shown
from .model.errors import InvalidValueError

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")

Parts = Generator[Callable[[], Any], Any, R]
"""Work in parts: yields calls, gets what they return or raise, and returns its value.

A coroutine does each call in a thread, unless the call has a method `awaited`.
"""

THREADS = 10
"""The most threads, and so connections to a store, that the coroutines of one process use at once for verbs."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A part that lets some seconds pass."""

    seconds: float

    def __call__(self) -> None:
        time.sleep(self.seconds)

    async def awaited(self) -> None:
        """Let them pass, and the event loop go on."""
        await asyncio.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class Own:
    """A part that is the caller's own function, which may be an `async def`."""

    function: Callable[[], Any]

    def __call__(self) -> Any:
        return self.function()

    async def awaited(self) -> Any:
        """Call an `async def` in the event loop, and anything else in a thread, because it may block."""
        function: Any = self.function
        while isinstance(function, partial):
            function = function.func
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await self.function()
        value = await in_thread(self.function, is_brief=False)
        return await value if inspect.isawaitable(value) else value


@dataclass(frozen=True, slots=True)
class Item:
    """What an iteration in parts hands over: no call, but a value."""

    value: Any


Items = Generator["Callable[[], Any] | Item", Any, None]


def here(parts: Parts[R]) -> R:
    """Do the work in this thread."""
    done: R = _to_item(parts).value
    return done


async def whole(parts: Parts[R]) -> R:
    """Do the work, and let the event loop go on meanwhile."""
    done: R = (await _awaited_to_item(parts)).value
    return done


def each(items: Items) -> Iterator[Any]:
    """Iterate over what items in parts hand over, in this thread."""
    try:
        while isinstance(found := _to_item(items), Item):
            yield found.value
    finally:
        items.close()


def _to_item(parts: Generator[Any, Any, Any]) -> Item | StopIteration:
    """Do the parts up to the next item, or to their end."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            part = parts.send(value) if error is None else parts.throw(error)
            if isinstance(part, Item):
                return part
            value, error = part(), None
        except BaseException as raised:  # also a time limit, which is a signal: it strikes in the work, not beside it
            error = raised
            if _are_over(parts):
                return _end(raised)


async def _awaited_to_item(parts: Generator[Any, Any, Any]) -> Item | StopIteration:
    """Do the same, and let the event loop go on meanwhile."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            part = parts.send(value) if error is None else parts.throw(error)
            if isinstance(part, Item):
                return part
            value, error = await _done(part), None
        except BaseException as raised:
            error = raised
            if _are_over(parts):
                return _end(raised)


def _are_over(parts: Any) -> bool:
    return parts.gi_frame is None


def _end(raised: BaseException) -> StopIteration:
    """Return the end of parts that are over, which has their value; raises their error."""
    if isinstance(raised, StopIteration):
        return raised
    raise raised


async def _done(part: Any) -> Any:
    return await (part.awaited() if hasattr(part, "awaited") else in_thread(part))


@cache
def _threads() -> Executor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="celery_sidejob aio")


os.register_at_fork(after_in_child=_threads.cache_clear)  # they are the parent's


async def in_thread(work: Callable[[], R], *, is_brief: bool = True) -> R:
    """Call a function in a thread with this context; in a thread of the event loop's own if it may take long.

    If the caller is cancelled meanwhile, it is so when the function has returned: it goes on in its thread, and what
    comes next must not meet it there.
    """
    threads = _threads() if is_brief else None
    future = asyncio.get_running_loop().run_in_executor(threads, partial(copy_context().run, work))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    future.exception()
    raise cancelled


async def ask(verb: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call a verb; with a `transaction=` that is asynchronous, by the event loop's own statements."""
    transaction = kwargs.get("transaction")
    if transaction is None:
        return await in_thread(partial(verb, *args, **kwargs))
    from .store.borrowed import lending  # here, because the pool asyncio needs no Postgres

    half, is_asynchronous = lending.half(transaction)
    work = partial(verb, *args, **{**kwargs, "transaction": half})
    return await (lending.spawn(work) if is_asynchronous else in_thread(work))


FIRST_LOOK_S = 0.01
LONGEST_LOOK_S = 0.25
"""The longest pause between two reads: a short wait ends at once; a long wait asks the store four times a second."""


def wait_until(is_over: Callable[[], bool], timeout: float | None) -> Parts[bool]:
    """Call `is_over` until it returns True; False if it has not after `timeout` seconds. None waits for ever."""
    if timeout is not None and not is_near(timeout) and timeout != math.inf:
        raise InvalidValueError(f"timeout= takes seconds, {MOST_S}, not {shown(timeout)}.")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    pause_s = FIRST_LOOK_S
    while not (yield is_over):
        if time.monotonic() >= deadline:
            return False
        yield Pause(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_LOOK_S)
    return True


class Aio(Generic[T]):
    """The verbs of a handle as coroutines. Nothing happens before a coroutine is awaited."""

    __slots__ = ("_handle",)

    def __init__(self, handle: T) -> None:
        self._handle = handle

    def __repr__(self) -> str:
        return f"{self._handle!r}.aio"


class AioOf(Generic[R_co]):
    """The attribute `aio` of a handle: its class in `celery_sidejob.aio`, which knows all handles."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, handle: Any, owner: Any = None) -> R_co:
        if handle is None:
            return self  # type: ignore[return-value]
        made: R_co = getattr(import_module(".aio", __package__), self._name)(handle)
        return made


class verb(Generic[P, R]):  # noqa: N801 - it is used as a function is
    """A method of a handle as a coroutine function."""

    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None:
        self._name = method.__name__
        self.__doc__ = method.__doc__

    def __get__(self, aio: Any, owner: Any = None) -> Callable[P, Coroutine[Any, Any, R]]:
        return self if aio is None else partial(self._called, getattr(aio._handle, self._name))  # type: ignore[return-value]

    async def _called(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return await ask(method, *args, **kwargs)


class reading(Generic[T, R]):  # noqa: N801 - likewise
    """An attribute of a handle that asks the store, as a coroutine: ``await job.aio.children``."""

    def __init__(self, read: Callable[[T], R]) -> None:
        self._read = read

    def __get__(self, aio: Any, owner: Any = None) -> Coroutine[Any, Any, R]:
        return self if aio is None else in_thread(partial(self._read, aio._handle))  # type: ignore[return-value]


class parted(verb[P, R]):  # noqa: N801 - likewise
    """A method as a coroutine function that does the work in parts, which another method of the handle has."""

    def __init__(self, method: Callable[Concatenate[Any, P], R], parts: Callable[..., Parts[R]]) -> None:
        super().__init__(method)
        self._parts = parts

    async def _called(self, method: Any, *args: Any, **kwargs: Any) -> R:
        if kwargs.get("transaction") is not None:
            return await ask(method, *args, **kwargs)
        return await whole(self._parts(method.__self__, *args, **kwargs))


class Each(AsyncIterator[T]):
    """Iterates over what items in parts hand over: ``async for job in sidejob.aio.iter_jobs()``.

    It is no asynchronous generator: an iteration that is left ends at once, in the context of the code that leaves it.
    """

    def __init__(self, items: Items) -> None:
        self._items = items

    async def __anext__(self) -> T:
        found = await _awaited_to_item(self._items)
        if isinstance(found, StopIteration):
            raise StopAsyncIteration
        value: T = found.value
        return value


def _part(work: Callable[[], R]) -> Parts[R]:
    value: R = yield work
    return value


def items_of(make: Callable[[], Iterable[Any]], do: Callable[[Callable[[], Any]], Parts[Any]] = _part) -> Items:
    """Return the items of an iterable whose iteration may block, each got by `do`."""
    iterator = yield lambda: iter(make())
    while (found := (yield from do(partial(next, iterator, _END)))) is not _END:
        yield Item(found)


_END: Any = object()

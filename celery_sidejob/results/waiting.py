"""Callers that wait for results, in a thread or a coroutine of their own, and the thread that listens for all of them.

That thread is started by the first caller that waits, and ends when nobody has waited for a while. It has one session.
What it hears it reads, and hands over as bytes: a caller decodes its results itself. Behind the notifications it looks
for itself, at growing intervals: one may be lost with a connection, and through a proxy that pools transactions none is
heard.
"""

from __future__ import annotations

import asyncio
import queue
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, sleep
from typing import Any

from celery import states
from celery.app.task import Task
from celery.backends.asynchronous import BaseResultConsumer, Drainer
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import ResultBase, ResultSet

from ..awaiting import Each, Item, Items, ask, each, in_thread, wait_until, whole
from ..model.errors import StoreUnavailableError
from ..model.logger import logger
from ..model.native import Pipe
from ..store import results
from ..store.connection.bounded import forget_in_children
from ..store.connection.opening import Opener
from ..store.connection.own_executor import OwnExecutor

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

    def _wait_for_pending(self, result: Any, **options: Any) -> Iterator[None]:
        """Yield each time that results may have been resolved, until this one is; TimeoutError after `timeout`."""
        yield from each(self.waiting(result, **options))

    def waiting(
        self,
        result: Any,
        timeout: float | None = None,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[[Any], Any] | None = None,
        **_: Any,
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


BACK_OFF_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""When the listening thread looks for itself, after somebody began to wait, and after each notification."""
DEAF_S = 0.5
"""The longest pause between two looks if that thread hears nothing, or only of results that others wait for.

The process that tells of these may have told of one more, just after them, to nobody: see `place.APART_S`.
"""
SHARE = 20
"""A look comes again after this many times as long as it took, at least."""
IDLE_S = 30.0
"""The session is closed after so many seconds in which nobody waits."""
READY_S = 5.0
"""The longest time that a caller waits for the session; then it waits for its result, which will be looked for."""
LOCKED_S = 0.002
"""The pause before the thread asks again for the lock of listeners, which a session has that keeps a result."""
AWAY_S = (0.1, 0.5, 1.0, 2.0)
"""The pauses between attempts to connect."""


class Wait:
    """What one caller waits for: `keys`, each with the body that was handed over last."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys: dict[str, bytes | None] = dict.fromkeys(keys)
        self.told: Callable[[], object] = lambda: None
        """Is called, in any thread, after something has been handed over."""
        self._come: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def hand_over(self, found: Mapping[str, bytes]) -> None:
        """Have the caller take what was found, unless it has that."""
        with self._lock:  # the caller looks too, as it begins to wait
            for key in self.keys.keys() & found.keys():
                if self.keys.get(key, b"") != found[key]:
                    self.keys[key] = found[key]
                    self._come.put((key, found[key]))
                    self.told()

    def take(self, timeout_s: float) -> Iterator[tuple[str, bytes]]:
        """Yield what has come, key and body; wait for the first for at most this long."""
        with suppress(queue.Empty):
            yield self._come.get(timeout=timeout_s) if timeout_s > 0 else self._come.get_nowait()
            while True:
                yield self._come.get_nowait()


class Ear:
    """Listens in one schema of one database. Any thread may wait; a forked process begins anew."""

    def __init__(self, opener: Opener, schema: str) -> None:
        self._opener = opener
        self._schema = schema
        forget_in_children(self)
        self.forget()

    def forget(self) -> None:
        """After a fork, leave the session to the parent, and forget who waits there."""
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._wakes: Pipe | None = None
        self._rung: set[str] = set()
        self._is_all_rung = False
        self._look_at = inf
        self._step = 0
        self._hears = False

    @property
    def listens(self) -> bool:
        """Whether notifications are heard just now."""
        return self._thread is not None and self._hears

    @contextmanager
    def waiting(self, wait: Wait, deadline: float) -> Iterator[None]:
        """Hand over what comes for this caller within the block, to whose beginning it listens, if it can.

        It listens later if there is no session by the caller's deadline.
        """
        with self._lock:
            self._waits.add(wait)
            if self._thread is None:
                self._wakes = Pipe()
                self._ready.clear()
                self._thread = threading.Thread(target=self._run, name="sidejob-results-ear", daemon=True)
                self._thread.start()
        try:
            self._ready.wait(max(0.0, min(READY_S, deadline - monotonic())))
            if self._look_at > monotonic() + BACK_OFF_S[0]:
                self._look_soon()
                if (wakes := self._wakes) is not None:
                    wakes.write()
            yield
        finally:
            self._waits.discard(wait)

    def _look_soon(self) -> None:
        self._step = 0
        self._look_at = min(self._look_at, monotonic() + BACK_OFF_S[0])

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                executor = self._opener.connect()
                try:
                    self._hears = self._listen(executor)
                    failures = 0
                    self._ready.set()
                    self._look_soon()  # something may have come while there was no session
                    self._go_on(executor)
                    return
                finally:
                    self._hears = False
                    executor.close()
            except Exception as error:
                if not failures:
                    logger.warning("Results are not heard of for now, and looked for again: %s", error)
                self._ready.set()
                sleep(AWAY_S[min(failures, len(AWAY_S) - 1)])
                failures += 1
                if self._ends(0.0):
                    return

    def _listen(self, executor: OwnExecutor) -> bool:
        """Listen, and tell whether that is possible."""
        if executor.pooled:
            return False
        while not results.listen(executor, self._schema, self._hear):
            sleep(LOCKED_S)
        return True

    def _hear(self, keys: Sequence[str] | None) -> None:
        if keys is None:
            self._is_all_rung = True
        else:
            self._rung.update(keys)

    def _go_on(self, executor: OwnExecutor) -> None:
        assert self._wakes is not None
        poll = select.poll()  # gevent's own under gevent, so that other greenlets go on
        poll.register(executor.connection.fileno(), select.POLLIN)
        poll.register(self._wakes.fileno(), select.POLLIN)
        waited_at = monotonic()
        while True:
            executor.take_in()  # the answer to the last look may have brought some, of which no file tells
            if not self._rung and not self._is_all_rung:
                poll.poll(1000 * max(0.0, min(self._look_at - monotonic(), IDLE_S)))
                self._wakes.drain()
                executor.take_in()
            now = monotonic()
            if self._waits:
                waited_at = now
            elif self._ends(waited_at + IDLE_S):
                return
            self._look(executor, now, longest_s=BACK_OFF_S[-1] if self._hears else DEAF_S)

    def _look(self, executor: OwnExecutor, now: float, *, longest_s: float) -> None:
        """Read what was rung for, or all that is waited for if it is time."""
        wanted = {key for wait in list(self._waits) for key in list(wait.keys)}
        heard, self._rung = self._rung, set()
        rung = wanted & heard
        is_time = now >= self._look_at or self._is_all_rung
        self._is_all_rung = False
        if is_time:
            rung = wanted
        self._hand_over(executor, list(rung))
        if not wanted:
            self._look_at = inf
        elif is_time:
            pause_s = min(BACK_OFF_S[self._step], longest_s)
            self._step = min(self._step + 1, len(BACK_OFF_S) - 1)
            self._look_at = monotonic() + max(pause_s, SHARE * (monotonic() - now))
        elif rung:
            self._look_soon()
        elif heard:
            self._look_at = min(self._look_at, now + DEAF_S)

    def _hand_over(self, executor: OwnExecutor, keys: Sequence[str]) -> None:
        for page in results.pages(keys):
            found = executor.in_transaction("read", partial(results.read, keys=page), single=True)
            for wait in list(self._waits):
                wait.hand_over(found)

    def _ends(self, at: float) -> bool:
        """End the thread if nobody waits and it is time; the next caller that waits starts another one."""
        with self._lock:
            if self._waits or monotonic() < at:
                return False
            self._thread = None
            wakes, self._wakes = self._wakes, None
        if wakes is not None:
            wakes.close()
        return True

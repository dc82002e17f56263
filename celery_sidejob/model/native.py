"""What this process has of its system: real threads and locks, and its name. And what a block of code has of its own.

Threads and locks are those of the operating system, even where gevent has replaced Python's with its own. A thread of
gevent is a greenlet: it stands still while another greenlet computes. Work that must go on then needs a real thread,
and its data shared with greenlets needs real locks. Waiting for such a lock stops all greenlets of the thread. While
holding one, therefore, never do anything that may wait: a statement, a socket, a lock of gevent's.

Under eventlet all these are eventlet's own: its locks, including logging's, hang once two real threads want one.
"""

from __future__ import annotations

import importlib
import itertools
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def is_patched() -> bool:
    """Tell whether gevent has replaced Python's threads in this process."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def is_eventlet() -> bool:
    """Tell whether eventlet has replaced Python's way of waiting in this process."""
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("select"))


def lock() -> Any:
    """Return a lock to be held only briefly; its holder may acquire it again, as a signal handler may."""
    return _original("_thread", "RLock")()


def poll() -> Any:
    """Return an object that waits for files, like `select.poll`."""
    return _original("select", "poll")()


class Bell:
    """A signal for which a real thread can wait again and again; each ring wakes it once."""

    def __init__(self) -> None:
        self._gate = _original("_thread", "allocate_lock")()
        self._gate.acquire()

    def ring(self) -> None:
        """Wake the waiting thread, or the next one to wait; ringing again before that adds nothing."""
        with suppress(RuntimeError):
            self._gate.release()

    def wait(self, timeout: float, /) -> bool:
        """Wait until it rings, for at most this many seconds, and tell whether it has."""
        return bool(self._gate.acquire(timeout=timeout))


class Event:
    """An event like `threading.Event`, for a real thread to wait for; any thread may set it, once."""

    def __init__(self) -> None:
        make = _original("_thread", "allocate_lock")
        self._gate, self._once = make(), make()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it was set."""
        return bool(self._once.locked())

    def set(self) -> None:
        """Set it; setting it again is harmless."""
        if self._once.acquire(False):
            self._gate.release()

    def wait(self, timeout: float | None = None, /) -> bool:
        """Wait until it is set, for at most this many seconds, and tell whether it is."""
        if self._gate.acquire(timeout=-1 if timeout is None else timeout):
            self._gate.release()
        return self.is_set()


class Thread:
    """A real thread, which does not keep the process from exiting."""

    def __init__(self, target: Callable[[], None], *, name: str) -> None:
        self._target = target
        self._name = name
        self._alive = False

    def start(self) -> None:
        """Begin."""
        self._alive = True
        _original("_thread", "start_new_thread")(self._run, ())

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._alive

    def join(self, timeout: float) -> None:
        """Wait for its end, for at most this many seconds; greenlets continue meanwhile."""
        deadline = time.monotonic() + timeout
        while self._alive and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        threading.current_thread().name = self._name
        try:
            self._target()
        finally:
            self._alive = False


def _original(module: str, name: str) -> Any:
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None:
        return getattr(importlib.import_module(module), name)
    return monkey.get_original(module, name)


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable this value in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def new_process_name() -> str:
    """Return a name that no process has or had: host:process:random, and from the second name on a number."""
    number = next(_numbers_of(os.getpid()))
    return f"{_of_process(os.getpid())}{f'.{number}' if number > 1 else ''}"


@cache
def _of_process(pid: int) -> str:
    return f"{socket.gethostname()}:{pid}:{secrets.token_hex(6)}"


@cache
def _numbers_of(pid: int) -> Iterator[int]:
    return itertools.count(1)

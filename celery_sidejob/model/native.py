"""Real threads, locks and pipes of this process, and its name; and context variables for a block of code.

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


class Pipe:
    """A pipe by which one thread wakes another that waits for files; a forked copy leaves it to the parent."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        self._pid = os.getpid()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        self._is_written = False

    def fileno(self) -> int:
        """Return what is readable once it was written."""
        return self._reading

    def write(self) -> None:
        """Wake whoever waits, or waits next; writing again before that adds nothing."""
        if not self._is_written:
            self._is_written = True
            with suppress(OSError):
                os.write(self._writing, b"\0")

    def drain(self) -> None:
        """Be unwritten; whoever has drained it looks at everything afterwards."""
        with suppress(OSError):
            os.read(self._reading, 4096)
        self._is_written = False  # after the read, which would take what is written in between, and nobody be woken

    def close(self) -> None:
        """Close both ends."""
        if self._pid != os.getpid():
            return
        self._is_written = True
        for end in (self._reading, self._writing):
            with suppress(OSError):
                os.close(end)
        self._pid = 0


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

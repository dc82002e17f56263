"""Keeps an event loop going while its thread asks the store, or names the call that its code should await instead."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ...model.logger import logger

Elsewhere = Callable[[], Callable[[Callable[[], Any]], Any] | None]
"""Returns what does work in another thread while the loop goes on, or None if the code in progress is not to wait so.
"""

_OWN = str(Path(__file__).parents[2])
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
_told_of: set[str] = set()
running_loop = asyncio._get_running_loop
"""Returns the event loop that is in progress in this thread; the public one raises without a loop, which costs more."""
_elsewhere: Elsewhere = lambda: None  # noqa: E731 - until a pool has an event loop


def use(elsewhere: Elsewhere) -> None:
    """Set how work is done elsewhere."""
    global _elsewhere
    _elsewhere = elsewhere


def elsewhere() -> Callable[[Callable[[], Any]], Any] | None:
    """Return what does work in another thread; without it the loop is blocked, and the user's call is named."""
    found = _elsewhere()
    if found is None:
        _warn_once()
    return found


def wait_for(lock: threading.RLock) -> None:
    """Wait until a lock is free, while the loop goes on; where it cannot, who takes the lock waits."""
    waits_elsewhere = _elsewhere() if running_loop() is not None else None
    while waits_elsewhere is not None and not lock.acquire(blocking=False):
        waits_elsewhere(partial(_take, lock))
    if waits_elsewhere is not None:
        lock.release()


def _take(lock: threading.RLock) -> None:
    with lock:
        pass


def _warn_once() -> None:
    """Warn of the verb through which user code has come here, once for each verb."""
    verb: FrameType | None = sys._getframe(1)
    caller = verb
    while caller is not None and caller.f_code.co_filename.startswith((_OWN, *_LIBRARIES)):
        verb, caller = caller, caller.f_back
    if caller is None or verb is None:  # Celery's tracer, or SQLAlchemy, in its own time
        return
    name = verb.f_code.co_name
    if name in _told_of:
        return
    _told_of.add(name)
    logger.warning(
        "%s() in line %d of %s asks the store, and the event loop of this thread stands still meanwhile. Await it "
        "instead: %s. The log tells this once for each call.",
        name,
        caller.f_lineno,
        caller.f_code.co_filename,
        _awaited(name, verb.f_locals.get("self")),
    )


def _awaited(name: str, handle: Any) -> str:
    if hasattr(type(getattr(handle, "aio", None)), name):  # of the instance, a property would ask the store
        return f"await ….aio.{name}(…)"
    if name == "each":
        return "async for … in job.aio.for_inputs(…)"
    if name in ("delay", "apply_async", "enqueue", "get"):
        return f"await ….a{name}(…)"
    return f"await asyncio.to_thread(….{name}, …)"

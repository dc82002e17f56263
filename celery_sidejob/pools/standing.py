"""Notices an event loop that stands still, and names the line that keeps it."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
import time
from traceback import walk_stack
from types import FrameType

from ..model.logger import logger
from .body import Body

LONGEST_S = 1.0
BEAT_S = 0.25

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")


class Watch:
    """A thread that watches the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._loop = loop
        self._watched = thread
        self._moved_at = time.monotonic()
        self.stood: tuple[float, str] | None = None
        """When the loop last stood still, by the clock `time.monotonic`, and where."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="celery_sidejob watch", daemon=True)

    def start(self) -> None:
        """Begin; in any thread."""
        self._loop.call_soon_threadsafe(self._beat)
        self._thread.start()

    def stop(self) -> None:
        """End; in any thread."""
        self._is_over.set()

    def _beat(self) -> None:
        self._moved_at = time.monotonic()
        self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        told_of = 0.0
        while not self._is_over.wait(BEAT_S):
            moved_at = self._moved_at
            still_s = time.monotonic() - moved_at
            if still_s > LONGEST_S + BEAT_S and told_of != moved_at:
                told_of = moved_at
                self._tell(still_s)

    def _tell(self, still_s: float) -> None:
        frame = sys._current_frames().get(self._watched.ident or 0)
        if frame is None:
            return
        where = _own_code(frame)
        code = where.f_code
        place = f"{_task_of(frame)} is in {code.co_name}, line {where.f_lineno} of {code.co_filename}"
        self.stood = time.monotonic(), place
        logger.warning(
            "The event loop of this worker has stood still for %.1f s: %s. All its bodies wait meanwhile. Await what "
            "takes long there, or run it by asyncio.to_thread().",
            still_s,
            place,
        )


def _own_code(innermost: FrameType) -> FrameType:
    """Return the innermost frame that is of no library: its author can change it."""
    frames = (frame for frame, _ in walk_stack(innermost))
    return next((frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)), innermost)


def _task_of(innermost: FrameType) -> str:
    for frame, _ in walk_stack(innermost):
        if frame.f_code is Body._drive.__code__:
            body: Body = frame.f_locals["self"]
            return body.name
    return "a task of asyncio, or Celery itself,"

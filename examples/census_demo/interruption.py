"""Ctrl-C and similar signals, as one exception, once: a second signal must not interrupt the cleanup."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """The demo is to end. It is no Exception, so that no code takes it for a failure."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} received")
        self.exit_code = 128 + number


class Interruption:
    """Listens to SIGINT, SIGTERM and SIGHUP in place of Python; the first one raises Interrupted in the main thread."""

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        """The signal that was received."""
        self._listening = True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, and Ctrl-C in the background of a script
                signal.signal(number, self._hear)
        sys.unraisablehook = _hook(sys.unraisablehook)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay a signal to the end of the block: a half-started process cannot be ended in good order."""
        self._listening = False
        try:
            yield
        finally:
            self._listening = True
        self.check()

    def check(self) -> None:
        """Raise a delayed signal, or one that was raised where Python swallows exceptions, such as in a finalizer."""
        if self.heard is not None:
            raise Interrupted(self.heard)

    def ignore(self) -> None:
        """Listen no more."""
        self._listening = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None:
            self.heard = signal.Signals(number)
            if self._listening:
                raise Interrupted(self.heard)


def _hook(before: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], None]:
    """Return a hook that is silent about a swallowed interruption: `check` raises it soon."""

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, Interrupted):
            before(unraisable)

    return hook

"""Waking a worker's event loop from any thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Bell:
    """A pipe that the loop listens to. Loops of kombu before 5.7 have nothing of their own for other threads."""

    def __init__(self) -> None:
        self._ear, self._clapper = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._clapper, False)

    def ring(self) -> None:
        """Wake the loop; from any thread."""
        with suppress(BlockingIOError):
            os.write(self._clapper, b"!")

    def register(self, hub: Any, heard: Callable[[], None]) -> None:
        """Have this loop call `heard`, in its own thread, after a ring."""

        def hear() -> None:
            with suppress(BlockingIOError):
                os.read(self._ear, 64)
            heard()

        hub.add_reader(self._ear, hear)

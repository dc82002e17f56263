"""How long a run's process waits for a store, and how often it tries again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..model.errors import StoreUnavailableError
from .runtime import Runtime

T = TypeVar("T")

PAUSE_S = 0.2
"""Seconds between two tries to reach an unavailable store."""


def patience_s(runtime: Runtime) -> float | None:
    """Return how long a run's statements wait for an answer: without another store, as long as this one answers."""
    return runtime.settings.lease if runtime.stores.several else None


def patiently(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat `once`, for a lease, while the store is unavailable: a short outage must not make it fail."""
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            return once()
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)

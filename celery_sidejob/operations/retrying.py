"""How long a run's process waits for a store, and how often it tries again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from .runtime import Runtime

T = TypeVar("T")

PAUSE_S = 0.2
"""Seconds between two tries to reach an unavailable store."""


def patience_s(runtime: Runtime) -> float | None:
    """Return how long a run's statements wait for an answer: without another store, as long as this one answers."""
    return runtime.settings.lease if runtime.stores.several else None


def patiently(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat `once`, for a lease, while the store is unavailable: a short outage must not make it fail.

    So also while a table or a right is missing, as during an upgrade by hand or a restore.
    """
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            return once()
        except (StoreUnavailableError, SchemaError) as error:
            if time.monotonic() > deadline:
                raise (
                    error if isinstance(error, StoreUnavailableError) else StoreUnavailableError(str(error))
                ) from error
            time.sleep(PAUSE_S)

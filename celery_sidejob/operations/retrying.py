"""How often a run's process tries again to reach a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..model.errors import SchemaError, StoreUnavailableError
from .runtime import Runtime

T = TypeVar("T")

PAUSE_S = 0.2
"""Seconds between two tries to reach an unavailable store."""


def patiently(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat `once`, for a lease, while the store is unavailable: a short outage must not make a run fail.

    It also repeats while a table or a right is missing, as during an upgrade by hand or a restore.
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

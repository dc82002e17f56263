"""How long a durable task's process waits for a store, and how often it tries again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..model.errors import StoreUnavailableError
from ..store.errors import NoAnswer, OutcomeUnknown
from .hold import PAUSE_S
from .runtime import Runtime

T = TypeVar("T")


def patience_s(runtime: Runtime) -> float | None:
    """Return how long what a run does waits for an answer: without another store, as long as this one answers."""
    return runtime.settings.lease if runtime.stores.several else None


def patiently(runtime: Runtime, once: Callable[[], T]) -> T:
    """Do what must not be given up for a store that is away for a moment: tries for a lease."""
    deadline = time.monotonic() + runtime.settings.lease
    while True:
        try:
            return once()
        except StoreUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE_S)


def repeat(once: Callable[[], T]) -> T:
    """Do what may be repeated again if its answer was lost with its connection; then its outcome stays unknown."""
    try:
        return once()
    except NoAnswer:
        raise
    except OutcomeUnknown as unknown:
        try:
            return once()
        except OutcomeUnknown:
            raise
        except StoreUnavailableError as error:
            raise OutcomeUnknown(f"{unknown} Then: {error}") from error

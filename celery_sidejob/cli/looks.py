"""Repeated reads of the store, for commands that follow something there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..model.errors import StoreUnavailableError
from .output import Output

T = TypeVar("T")

LOOK_S = 0.5
"""Seconds between two reads."""
HEARD_WITHIN_S = 5.0
"""How long a command waits for workers to end what they were told to end, in seconds."""


def looks(look: Callable[[], T], output: Output, *, deadline: float = math.inf) -> Iterator[T]:
    """Yield the result of each read, without an end; one of the reads is at the deadline.

    An error of the store is noted, and the store is read again; after the deadline the error is raised. The deadline
    is a time of `time.monotonic`.
    """
    while True:
        try:
            found = look()
        except StoreUnavailableError as error:
            if time.monotonic() >= deadline:
                raise
            output.note(str(error))
        else:
            yield found
        time.sleep(max(0.0, min(LOOK_S, deadline - time.monotonic())))


def wait_for_none(look: Callable[[], list[T]], output: Output) -> list[T]:
    """Read until the list is empty, for a while; return the last list."""
    deadline = time.monotonic() + HEARD_WITHIN_S
    for left in looks(look, output, deadline=deadline):
        if not left or time.monotonic() >= deadline:
            break
    return left

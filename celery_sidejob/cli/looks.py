"""Looks at something in the store again and again, for commands that follow it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..model.errors import StoreUnavailableError
from .output import Output

T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks."""
HEARD_WITHIN_S = 5.0
"""For how long a command waits for workers to end what they were told to end."""


def looks(
    look: Callable[[], dict[str, Any]], output: Output, *, deadline: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield what each look finds, without an end; one of the looks is at the deadline.

    A store that cannot be read is noted, and is looked at again; after the deadline its error is raised. The deadline
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
    """Look until nothing is left, for a while; return what is left then."""
    deadline, left = time.monotonic() + HEARD_WITHIN_S, []
    for found in looks(lambda: {"left": look()}, output, deadline=deadline):
        left = found["left"]
        if not left or time.monotonic() >= deadline:
            break
    return left

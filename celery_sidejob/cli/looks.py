"""Looks at something in the store again and again, for commands that follow it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..model.errors import StoreUnavailableError
from .output import Output

LOOK_S = 0.5
"""Between two looks."""


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

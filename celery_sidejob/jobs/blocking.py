"""Blocks a client until a job or a batch has come as far as it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ..model.checks import MOST_S, is_near, shown
from ..model.errors import InvalidValueError

FIRST_LOOK_S = 0.01
LONGEST_LOOK_S = 0.25
"""Between two looks: a short wait ends at once, and a long one asks the store four times a second."""


def block_until(is_over: Callable[[], bool], timeout: float | None) -> bool:
    """Ask until the answer is yes; False if it is still no after `timeout` seconds. None waits for ever."""
    if timeout is not None and not is_near(timeout) and timeout != math.inf:
        raise InvalidValueError(f"timeout= takes seconds, {MOST_S}, not {shown(timeout)}.")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    pause_s = FIRST_LOOK_S
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_LOOK_S)
    return True

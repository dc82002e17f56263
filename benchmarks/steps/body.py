"""What the programs of the sides share: a step that does nothing, and the commands of a client."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

STEPS = (1, 10, 100)
"""How many steps a job of a drain has."""
QUEUE = "steps"
CONCURRENCY = int(os.environ.get("CONCURRENCY", "2"))
"""How many jobs a worker runs at a time."""


def nothing() -> int:
    """Do nothing, as a step."""
    return 1


def obey(make: Callable[[int, int, bool], None], wake: Callable[[], None]) -> None:
    """Do what each line of the input says: `make COUNT STEPS RESTS`, and `wake` all that rest."""
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        if verb == "make":
            count, steps, rests = map(int, numbers)
            make(count, steps, bool(rests))
        else:
            wake()
        print("done", flush=True)

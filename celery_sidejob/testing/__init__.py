"""For tests of apps that use this package: workers that can be killed, servers, and questions about the store.

The fixtures are in `plugin.py`, which pytest finds by itself. docs/testing.md shows how to use them. Each name is
imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .assertions import assert_dead, assert_enqueued, assert_packets, assert_step, refute_enqueued
    from .crashes import crash_after, crash_before
    from .databases import empty_store, move_clock
    from .inline import run_job, run_until_quiet
    from .waiting import wait_until
    from .worker import Worker, Workers

_MODULE_OF = {
    "Worker": ".worker",
    "Workers": ".worker",
    "assert_dead": ".assertions",
    "assert_enqueued": ".assertions",
    "assert_packets": ".assertions",
    "assert_step": ".assertions",
    "crash_after": ".crashes",
    "crash_before": ".crashes",
    "empty_store": ".databases",
    "move_clock": ".databases",
    "refute_enqueued": ".assertions",
    "run_job": ".inline",
    "run_until_quiet": ".inline",
    "wait_until": ".waiting",
}

__all__ = [
    "Worker",
    "Workers",
    "assert_dead",
    "assert_enqueued",
    "assert_packets",
    "assert_step",
    "crash_after",
    "crash_before",
    "empty_store",
    "move_clock",
    "refute_enqueued",
    "run_job",
    "run_until_quiet",
    "wait_until",
]


def __getattr__(name: str) -> Any:
    """Import a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

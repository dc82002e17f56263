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

_NAMES = {
    ".assertions": ("assert_dead", "assert_enqueued", "assert_packets", "assert_step", "refute_enqueued"),
    ".crashes": ("crash_after", "crash_before"),
    ".databases": ("empty_store", "move_clock"),
    ".inline": ("run_job", "run_until_quiet"),
    ".waiting": ("wait_until",),
    ".worker": ("Worker", "Workers"),
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
    module = next((module for module, names in _NAMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(module, __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

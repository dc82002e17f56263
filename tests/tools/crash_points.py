"""Crash points of the test's own process: what happens there is the test's to say. For processes of their own there
is the environment's plan, see `celery_sidejob.model.crash_points`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob.model.crash_points import AnswerLost

Arm = Callable[[str, Callable[[], Any]], None]
"""Takes the name of a point, and what is to happen when it is reached for the next time."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Arm:
    """Has something happen, once, when a crash point is reached; then all goes on unless that was `lost`."""
    return arming(monkeypatch)


def arming(patch: pytest.MonkeyPatch) -> Arm:
    """Return what `at` is, for as long as the patch lasts."""
    armed: dict[str, Callable[[], Any]] = {}

    def reach(name: str) -> None:
        armed.pop(name, lambda: None)()

    for name, module in sys.modules.copy().items():  # another thread may import something meanwhile
        if name.startswith("celery_sidejob.") and hasattr(module, "reach"):
            patch.setattr(module, "reach", reach)
    return armed.__setitem__


def lost() -> None:
    """The connection breaks here: whether what was sent has been done, the caller cannot know."""
    raise AnswerLost("no answer came")

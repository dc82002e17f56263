"""Crash points of the test's own process: what happens there is the test's to say. For processes of their own there
is the environment's plan, see `celery_sidejob.model.crash_points`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_sidejob.model.crash_points import AnswerLost, acting

Arm = Callable[[str, Callable[[], Any]], None]
"""Takes the name of a point, and what is to happen when it is reached for the next time."""


@pytest.fixture
def at() -> Iterator[Arm]:
    """Has something happen, once, when a crash point is reached; then all goes on unless that was `lost`."""
    with arming() as arm:
        yield arm


@contextmanager
def arming() -> Iterator[Arm]:
    """Give what `at` is, within the block."""
    armed: dict[str, Callable[[], Any]] = {}
    with acting(lambda name: armed.pop(name, lambda: None)()):
        yield armed.__setitem__


def lost() -> None:
    """The connection breaks here: whether what was sent has been done, the caller cannot know."""
    raise AnswerLost("no answer came")

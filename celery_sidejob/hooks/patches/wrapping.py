"""Replacing a method of one object."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def wrap(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Have calls of a method of this object go to `by`, which is given what it replaces before the arguments."""
    setattr(owner, name, partial(by, getattr(owner, name)))

"""Somebody who looks at each message that is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import signals


@contextmanager
def looking() -> Iterator[None]:
    """Have somebody look at each message in the block."""

    def look(**_: Any) -> None:
        pass

    signals.before_task_publish.connect(look)
    try:
        yield
    finally:
        signals.before_task_publish.disconnect(look)

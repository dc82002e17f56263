"""What another client does between a transaction's look and its lock, where it can do the most harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_sidejob.operations import lock_set

Call = Callable[[], Any]
Between = Callable[[Call], None]


def between_look_and_lock(patch: pytest.MonkeyPatch, outside: Callable[[Call], None]) -> Between:
    """Return what has a call done, once, by `outside` between the next transaction's look and its lock.

    The call replaces one that is still to be done.
    """
    calls: list[Call] = []

    def do(call: Call) -> None:
        calls[:] = [call]

    def after_others(real: Callable[..., Any]) -> Callable[..., Any]:
        def lock(*given: Any, **options: Any) -> Any:
            if calls:
                outside(calls.pop())
            return real(*given, **options)

        return lock

    for name in ("lock", "lock_exclusively"):
        patch.setattr(lock_set.jobs, name, after_others(getattr(lock_set.jobs, name)))
    return do

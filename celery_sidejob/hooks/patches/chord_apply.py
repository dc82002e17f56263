"""Replaces `_chord.apply_async`, of all chords of this process; read in Celery 5.5.0 and 5.7.0.

Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. Ours takes it out of
the options, and what the call sends finds it in `hooks/tasks/chord_transaction.py`. A group with something after it is
called by this method too. If a later Celery calls chords in another way, one with a transaction fails with TypeError
before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from celery.canvas import _chord


def install(calling: Callable[..., AbstractContextManager[None]]) -> None:
    """Have all chords call their tasks within ``calling(transaction=...)``. Twice does no harm.

    Chords of an app without SideJob are as they were.
    """
    before = _chord.apply_async
    if hasattr(before, "_keeps_transaction"):
        return

    @wraps(before)
    def apply(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        if options.get("transaction") is None or getattr(self.app, "sidejob", None) is None:
            return before(self, args, kwargs, *more, **options)
        with calling(transaction=options.pop("transaction")):
            return before(self, args, kwargs, *more, **options)

    apply._keeps_transaction = True  # type: ignore[attr-defined]
    _chord.apply_async = apply

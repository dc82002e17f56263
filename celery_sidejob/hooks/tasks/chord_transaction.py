"""The transaction of a chord: `chord(...).apply_async(transaction=...)`, or that of a group with something after it.

Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. So it is kept from
Celery, and what the call sends takes it from here; the body is a part of those messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from celery.canvas import _chord

from .present_call import calling, present_call


def is_lending() -> bool:
    """Tell whether a chord that has a transaction makes this call."""
    return present_call().transaction is not None


@contextmanager
def handed_over(options: dict[str, Any]) -> Iterator[None]:
    """Put the transaction into the options of a call of the chord; what is called within the block has none of it."""
    options.setdefault("transaction", present_call().transaction)
    with calling(transaction=None):
        yield


def install() -> None:
    """Have all chords of this process call their tasks so; those of an app without SideJob are as they were."""
    if not hasattr(_chord.apply_async, "_keeps_transaction"):
        _chord.apply_async = _keeping_transaction(_chord.apply_async)


def _keeping_transaction(apply_async: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply_async)
    def apply(self: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        if options.get("transaction") is None or getattr(self._get_app(), "sidejob", None) is None:
            return apply_async(self, args, kwargs, *more, **options)
        with calling(transaction=options.pop("transaction")):
            return apply_async(self, args, kwargs, *more, **options)

    apply._keeps_transaction = True  # type: ignore[attr-defined]
    return apply

"""The transaction of a chord, `chord(...).apply_async(transaction=...)`, or of a group with a follow-up.

Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. So Celery does not
get it, and the messages of the call take it from here; the body is a part of these messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .present_call import calling, present_call


def is_lending() -> bool:
    """Tell whether a chord with a transaction makes this call."""
    return present_call().transaction is not None


@contextmanager
def handed_over(options: dict[str, Any]) -> Iterator[None]:
    """Put the chord's transaction into the options of a call; calls within the block do not have it."""
    options.setdefault("transaction", present_call().transaction)
    with calling(transaction=None):
        yield

"""The transaction of a chord: `chord(...).apply_async(transaction=...)`, or that of a group with something after it.

Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. So it is kept from
Celery, and what the call sends takes it from here; the body is a part of those messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .present_call import calling, present_call


def is_lending() -> bool:
    """Tell whether a chord that has a transaction makes this call."""
    return present_call().transaction is not None


@contextmanager
def handed_over(options: dict[str, Any]) -> Iterator[None]:
    """Put the chord's transaction into the options of a call; calls within the block do not have it."""
    options.setdefault("transaction", present_call().transaction)
    with calling(transaction=None):
        yield

"""The first store that answers: each call begins with the primary, and goes to the next store if it is unavailable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...store.errors import OutcomeUnknown, StoreDown
from ..runtime import Runtime

T = TypeVar("T")


def in_the_first(runtime: Runtime, do: Callable[[Runtime, tuple[str, ...]], T]) -> tuple[Runtime, tuple[str, ...], T]:
    """Run `do` in the first of the stores that answers; return that store's runtime, the stores tried, and the result.

    The stores tried took the call and did not answer, so they may have done it. `do` and the caller are told of them.
    """
    tried: list[str] = []
    failure: StoreDown | None = None
    stores = runtime.stores
    for there in runtime.in_each_store():
        if there.store.is_left_alone:
            continue
        try:
            with stores.trying(there.store):
                name = stores.name_of(there.store) if stores.several else ""
                return there, tuple(tried), do(there, tuple(tried))
        except OutcomeUnknown as error:
            tried.append(name)
            failure = error
        except StoreDown as error:
            failure = error
    raise failure or stores.all_left_alone()

"""The context of packets and of entries of the log: data that a block adds to everything that is written in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from ..model import native, values

_context: ContextVar[Mapping[str, Any]] = ContextVar("celery_sidejob_context", default=MappingProxyType({}))


@contextmanager
def context(**data: Any) -> Iterator[None]:
    """Add `data` to the context of every packet written in the block; an inner context overrides an outer one."""
    values.encode(data, what="context")
    with native.within(_context, {**_context.get(), **data}):
        yield


def current_context(*, limit: int | None = None) -> str | None:
    """Return the context of packets written now, as JSON text of at most `limit` bytes; None if it is empty."""
    data = _context.get()
    return values.encode(dict(data), limit=limit, what="context") if data else None

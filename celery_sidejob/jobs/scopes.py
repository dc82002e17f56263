"""Context managers whose effect ends with their block: `context` and `port_options`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..model import values
from .log_entries import one_entry

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PortScope:
    """How reads and writes inside a `port_options` block behave."""

    log: bool = True
    notify: bool = True
    set_default: bool = False


_context: ContextVar[Mapping[str, Any]] = ContextVar("celery_sidejob_context", default=_EMPTY)
_PLAIN = PortScope()
_port_scope: ContextVar[PortScope] = ContextVar("celery_sidejob_port_scope", default=_PLAIN)

current_port_scope = _port_scope.get
"""Returns what the `port_options` blocks around have set."""


@contextmanager
def context(**data: Any) -> Iterator[None]:
    """Have `data` travel with every packet written in the block; nested contexts merge, the inner one wins."""
    values.encode(data, what="context")
    token = _context.set({**_context.get(), **data})
    try:
        yield
    finally:
        _context.reset(token)


def current_context(*, limit: int | None = None) -> str | None:
    """Return the context packets are written with, as JSON text of at most `limit` bytes; None for an empty one."""
    data = _context.get()
    return values.encode(dict(data), limit=limit, what="context") if data else None


@contextmanager
def port_options(
    log: bool | None = None, notify: bool | None = None, set_default: bool | None = None
) -> Iterator[None]:
    """Change how ports behave in the block: `notify=False` asks nobody to run, `set_default=True` writes defaults.

    What is read and written in the outermost block is one entry of the log; with `log=False` it is none, and what is
    written then makes none when it is read. What is not given is inherited from the block around.
    """
    given = {"log": log, "notify": notify, "set_default": set_default}
    changed = {name: value for name, value in given.items() if value is not None}
    token = _port_scope.set(replace(_port_scope.get(), **changed))
    try:
        with one_entry(current_context):
            yield
    finally:
        _port_scope.reset(token)

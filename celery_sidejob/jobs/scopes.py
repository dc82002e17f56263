"""Context managers whose effect ends with their block: `context` and `port_options`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..model import native, values
from ..unit.open_unit import active
from .log_entries import one_entry

_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PortScope:
    """How reads and writes behave inside a `port_options` block."""

    log: bool = True
    notify: bool = True
    set_default: bool | None = None
    """None: as the turn of `for_inputs` wants it."""


_context: ContextVar[Mapping[str, Any]] = ContextVar("celery_sidejob_context", default=_EMPTY)
_PLAIN = PortScope()
_port_scope: ContextVar[PortScope] = ContextVar("celery_sidejob_port_scope", default=_PLAIN)

current_port_scope = _port_scope.get
"""Returns the settings of the surrounding `port_options` blocks."""


def writes_defaults() -> bool:
    """Tell whether a value written here is a port's default: a block says so, or a turn that has defaults only."""
    chosen, unit = _port_scope.get().set_default, active()
    return bool(chosen if chosen is not None else unit is not None and unit.has_defaults_only)


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


@contextmanager
def port_options(
    log: bool | None = None, notify: bool | None = None, set_default: bool | None = None
) -> Iterator[None]:
    """Change how ports behave in the block: `notify=False` asks no job to run, `set_default=True` writes defaults.

    All reads and writes of the outermost block make one entry of the log. With `log=False` they make none, and packets
    written then make none when they are read. An option that is not given is inherited from the surrounding block.
    """
    given = {"log": log, "notify": notify, "set_default": set_default}
    changed = {name: value for name, value in given.items() if value is not None}
    with native.within(_port_scope, replace(_port_scope.get(), **changed)), one_entry(current_context):
        yield

"""`port_options`: how ports behave in a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from ..unit.open_unit import active
from .log_entries import one_entry


@dataclass(frozen=True, slots=True)
class PortScope:
    """How reads and writes behave inside a `port_options` block."""

    log: bool = True
    notify: bool = True
    set_default: bool | None = None
    """None: as the turn of `for_inputs` wants it."""


_PLAIN = PortScope()
_port_scope: ContextVar[PortScope] = ContextVar("celery_sidejob_port_scope", default=_PLAIN)

current_port_scope = _port_scope.get
"""Returns the settings of the surrounding `port_options` blocks."""


def writes_defaults() -> bool:
    """Tell whether a value written here is a port's default: a block says so, or a turn that has defaults only."""
    chosen, unit = _port_scope.get().set_default, active()
    return bool(chosen if chosen is not None else unit is not None and unit.has_defaults_only)


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
    token = _port_scope.set(replace(_port_scope.get(), **changed))
    try:
        with one_entry():
            yield
    finally:
        _port_scope.reset(token)

"""Entries of the log: a user's own, and those for reads and writes of ports.

Without a receiver no entry is made. An entry that is made in a run belongs to its unit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal

from ..model import values
from ..model.changes import Announce, PortKey
from ..model.errors import IllegalMoveError, InvalidValueError
from ..model.names import LOG_CHANNEL
from ..operations import log
from ..operations.runtime import Runtime
from ..unit.open_unit import OpenUnit, active, submit
from .context import current_context

Kind = Literal["read", "write"]


def log_entry(runtime: Runtime, entry: Any) -> None:
    """Make a user's entry: a mapping, a string, or an exception; in a run it belongs to its unit."""
    context = current_context()
    head = {**_loaded(context), **_run_of(active()), "timestamp": log.timestamp()}
    limit = runtime.settings.max_value_bytes
    text = values.encode({**head, **_fields(runtime, entry)}, limit=limit, what="log entry")
    unit = active()
    if unit is not None and unit.of_log:
        submit(runtime, "log", Announce(LOG_CHANNEL, text))
    else:
        submit(runtime, "log", log.published(text, context))


class Group:
    """The reads and writes of one entry: the values of each port, in the order of their first use.

    Values are kept as JSON texts, as they were when read or written. Beyond the size of the largest value they are only
    counted.
    """

    __slots__ = ("_omitted", "_runtime", "_size", "_unit", "_values")

    def __init__(self) -> None:
        self._runtime: Runtime | None = None  # enough without a receiver: each turn of `for_inputs` makes a group
        self._unit = active()

    def add(self, runtime: Runtime, kind: Kind, port: PortKey, texts: Sequence[str]) -> None:
        """Add values that were read from a port, or written to it."""
        if self._runtime is None:
            self._runtime = runtime
            self._values: dict[Kind, dict[PortKey, list[str]]] = {"read": {}, "write": {}}
            self._omitted: dict[tuple[Kind, PortKey], int] = {}
            self._size = 0
        found = self._values[kind].setdefault(port, [])
        for text in texts:
            if self._size + len(text) > runtime.settings.max_value_bytes:
                self._omitted[kind, port] = self._omitted.get((kind, port), 0) + 1
            else:
                self._size += len(text)
                found.append(text)

    def make_entry(self, transaction: Any = None) -> None:
        """Make the entry, if anything was read or written, even if the surrounding block has raised."""
        if self._runtime is None:
            return
        unit = active()
        if unit is not self._unit:  # a generator of an earlier run is closed late
            return
        runtime, context = self._runtime, current_context()
        head = {**_loaded(context), **_run_of(unit), "timestamp": log.timestamp()}
        fields = [f"{json.dumps(name)}: {values.encode(value)}" for name, value in head.items() if name not in KINDS]
        fields += [f"{json.dumps(kind)}: [{', '.join(self._ports(kind))}]" for kind in KINDS]
        change = log.change_for(runtime, "{" + ", ".join(fields) + "}", context, ask=_may_ask(transaction))
        if unit is None and transaction is None and log.announced(runtime, change):
            return
        try:
            submit(runtime, "log", change, transaction=transaction)
        except IllegalMoveError:  # the run is over: its last reads and writes are not committed either
            return

    def _ports(self, kind: Kind) -> Iterator[str]:
        for port, texts in self._values[kind].items():
            job_id, direction, name = port
            omitted = self._omitted.get((kind, port))
            rest = f', "omitted": {omitted}' if omitted else ""
            yield f'{{"job": {job_id}, "{direction}port": {json.dumps(name)}, "data": [{", ".join(texts)}]{rest}}}'


KINDS: tuple[Kind, ...] = ("read", "write")

_group: ContextVar[Group | None] = ContextVar("celery_sidejob_log_group", default=None)


class one_entry:  # noqa: N801 - it is used as a function is
    """Makes one entry of everything that is read and written in the block; the outermost of nested blocks does it."""

    __slots__ = ("_group",)

    def __init__(self) -> None:
        self._group: Group | None = None

    def __enter__(self) -> None:
        if _group.get() is None:
            self._group = Group()
            _group.set(self._group)

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            _group.set(None)  # by no token: the block may be a generator's, which another context goes on with
            self._group.make_entry()


def are_received(runtime: Runtime, transaction: Any = None) -> bool:
    """Tell whether a listener would receive an entry for a read or a write that is made here."""
    unit = active()
    if unit is not None and unit.of_log:
        return False
    return log.is_heard(runtime, ask=_may_ask(transaction))


def _may_ask(transaction: Any) -> bool:
    """Tell whether the store may be asked for listeners.

    Not while the caller's transaction is open: with a pool of connections the question could wait for the caller.
    """
    unit = active()
    return transaction is None and (unit is None or not unit.in_block)


def note(runtime: Runtime, uses: Sequence[tuple[Kind, PortKey]], texts: Sequence[str], transaction: Any = None) -> None:
    """Note values that were read from ports or written to ports, in the block's entry or in an entry of their own."""
    around = _group.get() if transaction is None else None
    group = Group() if around is None else around
    for kind, port in uses:
        group.add(runtime, kind, port, texts)
    if around is None:
        group.make_entry(transaction)


def is_unlogged(options: str | None) -> bool:
    """Tell whether reading a packet with these options makes no entry; if it is itself a log entry, tell its run.

    A run that has read a log entry makes no entries: it would receive those too, without end.
    """
    if options is None or options == "{}":
        return False
    found = json.loads(options)
    unit = active()
    if found.get("of_log") and unit is not None:
        unit.of_log = True
    return found.get("log") is False


def options_for(logged: bool) -> str | None:
    """Return the options of a packet that is written now."""
    unit = active()
    if unit is not None and unit.of_log:
        return log.OF_LOG
    return None if logged else log.UNLOGGED


def _loaded(context: str | None) -> dict[str, Any]:
    loaded: dict[str, Any] = values.decode(context) if context else {}
    return loaded


def _run_of(unit: OpenUnit | None) -> dict[str, Any]:
    return {} if unit is None else {"job": unit.hold.job_id, "run": unit.hold.run_no}


def _fields(runtime: Runtime, entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, str):
        return {"message": entry}
    if isinstance(entry, BaseException):
        return log.error_fields(runtime, entry)
    if isinstance(entry, Mapping):
        return entry
    raise InvalidValueError(
        f"log() takes a mapping, a string or an exception, not a {type(entry).__name__}: put it into a mapping, such "
        "as {'value': ...}."
    )

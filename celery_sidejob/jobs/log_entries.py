"""Entries of the log: a user's own, and those for reads and writes of ports and for errors of runs; and their context.

An entry is a message on the channel `/sidejob/log`, which the ports that subscribe to it keep. Without a receiver no
entry is made. An entry that is made in a run belongs to its unit. `context` adds data to all entries and packets that
are written in its block.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from ..model import native, values
from ..model.changes import Announce, PortKey, Publish
from ..model.errors import IllegalMoveError, InvalidValueError
from ..model.logger import logger
from ..model.names import LOG_CHANNEL, storable
from ..operations.changes.unit_of_work import carry_out
from ..operations.runtime import Runtime
from ..unit.open_unit import active, submit

Kind = Literal["read", "write"]
KINDS: tuple[Kind, ...] = ("read", "write")

UNLOGGED = '{"log": false}'
"""The options of a packet that makes no entry when it is read."""
OF_LOG = '{"log": false, "of_log": true}'
"""The options of packets that carry entries of the log: a run that has read one makes no entries itself."""


def log_entry(runtime: Runtime, entry: Any) -> None:
    """Make a user's entry: a mapping, a string, or an exception; in a run it belongs to its unit."""
    context = current_context()
    limit = runtime.settings.max_value_bytes
    text = values.encode({**_head(context), **_fields(runtime, entry)}, limit=limit, what="log entry")
    unit = active()
    if unit is not None and unit.of_log:
        submit(runtime, "log", Announce(LOG_CHANNEL, text))
    else:
        submit(runtime, "log", _published(text, context))


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
        fields = [
            f"{json.dumps(name)}: {values.encode(value)}" for name, value in _head(context).items() if name not in KINDS
        ]
        fields += [f"{json.dumps(kind)}: [{', '.join(self._ports(kind))}]" for kind in KINDS]
        change = _change_for(runtime, "{" + ", ".join(fields) + "}", context, ask=_may_ask(transaction))
        if unit is None and transaction is None and _announced(runtime, change):
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
    return _is_heard(runtime, ask=_may_ask(transaction))


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
        return OF_LOG
    return None if logged else UNLOGGED


# -- errors of runs ----------------------------------------------------------------------------------------------------


def log_error(runtime: Runtime, context: Mapping[str, Any], error: str, backtrace: str | None) -> None:
    """Make an entry for the error of a run, outside of any unit, if it would have a receiver; never raises.

    The run is over and its unit discarded; the entry must not depend on either.
    """
    try:
        change = error_entry(runtime, context, error, backtrace)
        if change is not None and not _announced(runtime, change):
            carry_out(runtime, "log", [change])
    except Exception as failure:
        _warn(context, failure)


def error_entry(
    runtime: Runtime, context: Mapping[str, Any], error: str, backtrace: str | None
) -> Publish | Announce | None:
    """Return the change that makes an entry for an error of a run; None without a receiver. Never raises."""
    try:
        if not _is_heard(runtime):
            return None
        entry = {**context, "timestamp": _now(), **_error_fields(runtime, error, backtrace)}
        return _change_for(runtime, values.encode(entry), json.dumps(dict(context)))
    except Exception as failure:
        _warn(context, failure)
        return None


# -- the context -------------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------------------------


def _is_heard(runtime: Runtime, *, ask: bool = True) -> bool:
    """Tell whether an entry would have a receiver; without `ask` the store is not asked."""
    return runtime.audience.keeps_log(ask=ask) or runtime.announcer.may_be_heard(LOG_CHANNEL, ask=ask)


def _change_for(runtime: Runtime, text: str, context: str | None, *, ask: bool = True) -> Publish | Announce:
    """Return the change that makes an entry; if no port keeps the log, the entry is only announced."""
    return _published(text, context) if runtime.audience.keeps_log(ask=ask) else Announce(LOG_CHANNEL, text)


def _announced(runtime: Runtime, change: Publish | Announce) -> bool:
    """Make an entry that is only announced and needs no commit; False if the change must be applied."""
    if isinstance(change, Announce):
        runtime.announcer.announce(change.channel, change.value)
        return True
    return False


def _published(text: str, context: str | None) -> Publish:
    """Return the change that makes an entry for the ports that keep the log and for its listeners."""
    return Publish(LOG_CHANNEL, text, context, OF_LOG)


def _head(context: str | None) -> dict[str, Any]:
    """Return the fields that each entry made here has: its context, its run, and the present time."""
    unit = active()
    run = {} if unit is None else {"job": unit.hold.job_id, "run": unit.hold.run_no}
    return {**(values.decode(context) if context else {}), **run, "timestamp": _now()}


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _warn(context: Mapping[str, Any], failure: Exception) -> None:
    logger.warning("An error of job %s is not in the log: %s", context.get("job"), failure)


def _fields(runtime: Runtime, entry: Any) -> Mapping[str, Any]:
    if isinstance(entry, str):
        return {"message": entry}
    if isinstance(entry, BaseException):
        backtrace = "".join(traceback.format_exception(entry))
        return _error_fields(runtime, str(entry) or type(entry).__name__, backtrace)
    if isinstance(entry, Mapping):
        return entry
    raise InvalidValueError(
        f"log() takes a mapping, a string or an exception, not a {type(entry).__name__}: put it into a mapping, such "
        "as {'value': ...}."
    )


def _error_fields(runtime: Runtime, error: str, backtrace: str | None) -> dict[str, Any]:
    """Return the fields of an entry for an error; `sidejob_redact` is applied to them."""
    fields = {"error": runtime.settings.redacted(storable(error))}
    if backtrace is not None:
        fields["backtrace"] = runtime.settings.redacted(storable(backtrace))
    return fields

"""The log: its entries are messages on the channel `/sidejob/log`, kept by the ports that subscribe to it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ..model import values
from ..model.changes import Announce, Publish
from ..model.logger import logger
from ..model.names import LOG_CHANNEL, storable
from .changes.unit_of_work import carry_out
from .runtime import Runtime

UNLOGGED = '{"log": false}'
"""The options of a packet that makes no entry when it is read."""
OF_LOG = '{"log": false, "of_log": true}'
"""The options of packets that carry entries of the log: a run that has read one makes no entries itself."""


def is_heard(runtime: Runtime, *, ask: bool = True) -> bool:
    """Tell whether an entry would have a receiver; without `ask` the store is not asked."""
    return runtime.audience.keeps_log(ask=ask) or runtime.announcer.may_be_heard(LOG_CHANNEL, ask=ask)


def change_for(runtime: Runtime, text: str, context: str | None, *, ask: bool = True) -> Publish | Announce:
    """Return the change that makes an entry; if no port keeps the log, the entry is only announced."""
    return published(text, context) if runtime.audience.keeps_log(ask=ask) else Announce(LOG_CHANNEL, text)


def announced(runtime: Runtime, change: Publish | Announce) -> bool:
    """Make an entry that is only announced and needs no commit; False if the change must be applied."""
    if isinstance(change, Announce):
        runtime.announcer.announce(change.channel, change.value)
        return True
    return False


def published(text: str, context: str | None) -> Publish:
    """Return the change that makes an entry for the ports that keep the log and for its listeners."""
    return Publish(LOG_CHANNEL, text, context, OF_LOG)


def timestamp() -> str:
    """Return the present time in the form of an entry's timestamp."""
    return datetime.now(UTC).isoformat()


def error_fields(runtime: Runtime, error: BaseException) -> dict[str, Any]:
    """Return the fields of an entry for an exception."""
    return _error_fields(runtime, str(error) or type(error).__name__, "".join(traceback.format_exception(error)))


def log_error(runtime: Runtime, context: Mapping[str, Any], error: str, backtrace: str | None) -> None:
    """Make an entry for the error of a run, outside of any unit, if it would have a receiver; never raises.

    The run is over and its unit discarded; the entry must not depend on either.
    """
    try:
        change = error_entry(runtime, context, error, backtrace)
        if change is not None and not announced(runtime, change):
            carry_out(runtime, "log", [change])
    except Exception as failure:
        _warn(context, failure)


def error_entry(
    runtime: Runtime, context: Mapping[str, Any], error: str, backtrace: str | None
) -> Publish | Announce | None:
    """Return the change that makes an entry for an error of a run; None without a receiver. Never raises."""
    try:
        if not is_heard(runtime):
            return None
        entry = {**context, "timestamp": timestamp(), **_error_fields(runtime, error, backtrace)}
        return change_for(runtime, values.encode(entry), json.dumps(dict(context)))
    except Exception as failure:
        _warn(context, failure)
        return None


def _warn(context: Mapping[str, Any], failure: Exception) -> None:
    logger.warning("An error of job %s is not in the log: %s", context.get("job"), failure)


def _error_fields(runtime: Runtime, error: str, backtrace: str | None) -> dict[str, Any]:
    """Return the fields of an entry for an error; `sidejob_redact` is applied to them."""
    fields = {"error": runtime.settings.redacted(storable(error))}
    if backtrace is not None:
        fields["backtrace"] = runtime.settings.redacted(storable(backtrace))
    return fields

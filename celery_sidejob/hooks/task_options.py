"""The options of sidejob tasks that are ours, checked where they stand: before any app exists."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..model.errors import SettingsError
from ..model.port import parse_ports

LATER_OPTIONS = frozenset({"run_rate", "on_run_rate", "publish_status", "capacity"})
"""Refused as long as nothing acts on them."""

OF_OTHERS = frozenset({"durable"})
"""An option of ours that is for ordinary tasks."""

OWN_OPTIONS = LATER_OPTIONS | OF_OTHERS | {
    "inports", "outports", "lease_renewal", "lease", "max_losses", "on_lost", "retention",
}  # fmt: skip


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse wrong options, and return a copy of the others."""
    for name in sorted(LATER_OPTIONS & options.keys()):
        raise SettingsError(f"The task option {name!r} is not supported yet: leave it out.")
    for name in sorted(OF_OTHERS & options.keys()):
        raise SettingsError(
            f"The task option {name!r} is for ordinary tasks; a sidejob task makes jobs, which are durable as they "
            "are: leave it out."
        )
    parse_ports(options.get("inports", ()), where="inports")
    parse_ports(options.get("outports", ()), where="outports")
    renewal = options.get("lease_renewal", "auto")
    if renewal not in ("auto", "manual"):
        raise SettingsError(f"lease_renewal is 'auto' or 'manual', not {renewal!r}.")
    if (renewal == "manual") != (options.get("lease") is not None):
        raise SettingsError('lease= is the deadline of a run with lease_renewal="manual": give both, or neither.')
    lease = options.get("lease")
    if lease is not None and (isinstance(lease, bool) or not isinstance(lease, int | float) or not lease > 0):
        raise SettingsError(f"lease is a number of seconds above 0, not {lease!r}.")
    losses = options.get("max_losses")
    if losses is not None and (isinstance(losses, bool) or not isinstance(losses, int) or losses < 1):
        raise SettingsError(f"max_losses is a number of runs, at least 1, not {losses!r}.")
    if options.get("on_lost", "requeue") not in ("requeue", "dead"):
        raise SettingsError(f"on_lost is 'requeue' or 'dead', not {options['on_lost']!r}.")
    kept = options.get("retention")
    seconds = kept.total_seconds() if isinstance(kept, timedelta) else kept
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < 0):
        raise SettingsError(f"retention is a timedelta or a number of seconds, not {kept!r}.")
    return dict(options)

"""The ports of jobs as the run in progress has read them from the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model.changes import Change, ConfigurePorts, SetChannels, SetDefault, Write
from ..operations.runtime import Runtime
from ..store import ports


class KnownPorts:
    """Rows of ports by job, read once; those of a job whose ports a unit has made are read again after its commit."""

    def __init__(self, runtime: Runtime) -> None:
        self._connections = runtime.connections
        self._rows: dict[int, dict[tuple[str, str], Any]] = {}
        self._fresh: set[int] = set()

    def of(self, job_id: int, *, fresh: bool) -> Mapping[tuple[str, str], Any]:
        """Return a job's stored ports, {(direction, name): row}; `fresh`: read in this unit, not in an earlier one."""
        if job_id not in self._rows or (fresh and job_id not in self._fresh):
            rows = ports.of_jobs(self._connections, [job_id])
            self._rows[job_id] = {(row.direction, row.name): row for row in rows}
            self._fresh.add(job_id)
        return self._rows[job_id]

    def begin_next(self, applied: Sequence[Change]) -> None:
        """Forget what the changes of a unit that was applied have made of ports."""
        self._fresh.clear()
        for change in applied:
            match change:
                case ConfigurePorts():
                    self._rows.pop(change.job_id, None)
                case Write() | SetDefault() | SetChannels():
                    if (change.direction, change.port) not in self._rows.get(change.job_id, {}):
                        self._rows.pop(change.job_id, None)
                case _:
                    pass

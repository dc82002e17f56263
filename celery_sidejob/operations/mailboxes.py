"""Ports and their packets, as the changes of one transaction make them: a job's mailboxes, and who is told of mail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..model import channel as channels_of
from ..model.changes import Change, ConfigurePorts, NewJob, PortKey, PortRow, Publish, SetChannels, SetDefault, Write
from ..model.errors import PortNotFoundError
from ..model.port import WILDCARD
from ..store import packets, ports
from ..store.errors import Moved
from ..store.statement import Executor
from .runtime import Aftermath
from .touched import FAN_OUT, Touched
from .wakes import Wakes

PacketRow = tuple[int, str, str | None, str | None]
"""(port id, value, context, options), each text JSON."""


class Mailboxes:
    """The ports that a transaction makes, changes or writes to. `noting`: nothing is locked."""

    def __init__(
        self, executor: Executor, touched: Touched, wakes: Wakes, aftermath: Aftermath, *, noting: bool = False
    ) -> None:
        self._executor = executor
        self._touched = touched
        self._wakes = wakes
        self._aftermath = aftermath
        self._noting = noting
        self._rows: list[PacketRow] = []

    def configure(self, change: ConfigurePorts) -> None:
        """Replace a job's ports; the packets of those that stay are kept."""
        kept = ports.put(self._executor, [port_row(change.job_id, port) for port in change.ports])
        ports.keep_only(self._executor, change.job_id, [row.id for row in kept])
        self._touched.ports = {key: row for key, row in self._touched.ports.items() if key[0] != change.job_id}
        self._touched.ports.update({(row.job_id, row.direction, row.name): row for row in kept})

    def set_channels(self, change: SetChannels) -> None:
        """Set the channels of one port."""
        row = self._port((change.job_id, change.direction, change.port))
        port = PortRow(change.direction, change.port, row.default_value, change.channels)
        (row,) = ports.put(self._executor, [port_row(change.job_id, port)])
        self._touched.ports[row.job_id, row.direction, row.name] = row

    def subscribe_new_ports(self, changes: Sequence[Change]) -> None:
        """Have what is published here also reach the ports that these very changes subscribe."""
        if not self._touched.subscribers or not any(
            isinstance(change, NewJob | SetChannels | ConfigurePorts) for change in changes
        ):
            return
        for name in self._touched.subscribers:
            found = ports.subscribers(self._executor, channels_of.ancestors(name))
            locked = len(found) <= FAN_OUT and not self._noting
            if locked and any(row.job_id not in self._touched.statuses for row in found):
                raise Moved(f"somebody subscribed to {name!r} before the subscribers were locked")
            self._touched.subscribers[name] = found

    def write(self, change: Write | SetDefault | Publish) -> None:
        """Collect the packets of a change and tell their readers; `flush` stores them."""
        match change:
            case Write(as_default=True):
                port = self._port((change.job_id, change.direction, change.port))
                ports.set_default(self._executor, port.id, change.packets[-1][0])
                self._notify(change)
            case Write():
                port = self._port((change.job_id, change.direction, change.port))
                self._rows += [(port.id, *packet) for packet in change.packets]
                self._notify(change)
                for name in self._touched.channels_of(change) if change.direction == "out" else ():
                    for value, context, _ in change.packets:
                        self._publish(name, value, context)
            case SetDefault():
                port = self._port((change.job_id, change.direction, change.port))
                ports.set_default(self._executor, port.id, change.value)
            case Publish():
                self._publish(change.channel, change.value, change.context)

    def flush(self) -> None:
        """Store the packets, in the order in which they were written."""
        rows, self._rows = self._rows, []
        if rows:
            packets.write(self._executor, rows)

    def _port(self, key: PortKey) -> Any:
        """Return the port's row; one that the task allows by `"*"` is created by its first use."""
        if key in self._touched.ports:
            return self._touched.ports[key]
        job_id, direction, name = key
        pattern = self._touched.ports.get((job_id, direction, WILDCARD))
        if pattern is None:
            raise PortNotFoundError(
                f"Job {job_id} has no {direction}put port {name!r}. Give it when the job is made ({direction}ports=), "
                f'or let the task allow further ports with "*".'
            )
        port = PortRow(direction, name, pattern.default_value)
        self._touched.ports[key] = ports.put(self._executor, [port_row(job_id, port)])[0]
        return self._touched.ports[key]

    def _publish(self, name: str, value: str, context: str | None) -> None:
        self._aftermath.published.append((name, value))
        with_channel = json.dumps({**(json.loads(context) if context else {}), "channel": name})
        found = self._touched.subscribers[name]
        for row in found:
            if len(found) > FAN_OUT:
                self._wakes.note(row.job_id)
            else:
                self._wakes.nudge(row.job_id)
        self._rows += [(row.port_id, value, with_channel, None) for row in found]

    def _notify(self, change: Write) -> None:
        if not change.notify:
            return
        if change.direction == "in":
            self._wakes.nudge(change.job_id)
            return
        reader = self._touched.parents.get(change.job_id)
        if reader is not None:
            self._wakes.nudge(reader)


def port_row(job_id: int, port: PortRow) -> dict[str, Any]:
    """Return a port as the store takes it."""
    return {
        "job_id": job_id,
        "direction": port.direction,
        "name": port.name,
        "default_value": port.default,
        "channels": list(port.channels),
    }

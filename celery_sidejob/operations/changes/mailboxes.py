"""The changes of one transaction to ports and their packets: the job's mailboxes, and the wakes of their readers."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ...model import changes
from ...model.errors import FullPort
from ...model.port import WILDCARD, facing_ports, port_full, port_not_found, value_of
from ...store import asks, jobs, packets, ports, publications, room
from ...store.errors import Moved
from ...store.publications import Page
from ...store.statement import Transaction
from ..after_commit import AfterCommit
from ..hold import Hold
from ..lock_set import LockSet
from .wakes import Wakes

FEW = 100
"""The most ports for which the publishing transaction itself delivers the messages of a channel."""

PacketRow = tuple[int, str, str | None, str | None]
"""(port id, value, context, options), each text JSON."""


class Mailboxes:
    """The ports that a transaction makes, changes or writes to, and the messages that it publishes.

    `bounded`: a port with a limit refuses packets for which it has no room.
    """

    def __init__(self, lock_set: LockSet, wakes: Wakes, *, bounded: bool) -> None:
        self._executor = lock_set.executor
        self._lock_set = lock_set
        self._wakes = wakes
        self._after_commit = lock_set.after_commit
        self._rows: list[PacketRow] = []
        self._written: list[Any] = []
        self._messages: dict[str, list[publications.Message]] = {}
        self._bounded = bounded
        self._needs: dict[int, int] = {}
        self._limited: dict[int, Any] = {}
        self._read: set[int] = set()
        self.moved: list[Any] = []
        """The packets that were moved from one port to others."""

    def apply(self, change: changes.PortChange) -> None:
        """Change ports; the last value of a write may become the default. Packets follow later (`write`)."""
        match change:
            case changes.ConfigurePorts():
                self._configure(change)
            case changes.SetChannels():
                self._changed(ports.set_channels(self._executor, self._port(_key(change)).id, change.channels))
            case changes.MarkReceived():
                if not (port := self._port(_key(change))).received:
                    self._changed(ports.mark_received(self._executor, port.id))
            case changes.SetDefault():
                self._set_default(_key(change), change.value, notify=change.notify)
            case changes.Write(as_default=True):
                self._changed(ports.set_default(self._executor, self._port(_key(change)).id, change.packets[-1][0]))

    def _configure(self, change: changes.ConfigurePorts) -> None:
        """Replace a job's ports of one direction or both; the ports that stay keep their packets."""
        room.lock_all(self._executor, change.job_id)
        kept = ports.put(self._executor, [port_row(change.job_id, port) for port in change.ports])
        note_asks(self._executor, room.configured(self._executor, change.job_id), self._after_commit)
        ports.keep_only(self._executor, change.job_id, [row.id for row in kept], directions=change.directions)
        self._lock_set.set_ports(change.job_id, kept, directions=change.directions)
        self._after_commit.ports_changed(kept)

    def write(self, change: changes.Write | changes.Publish | changes.Connect) -> None:
        """Collect the packets and messages of a change and notify their readers; `flush` stores them."""
        match change:
            case changes.Write():
                port = None if change.as_default else self._port(_key(change))
                if port is not None:
                    self._rows += [(port.id, *packet) for packet in change.packets]
                    if change.packets:  # otherwise the unit has read them back itself
                        self._written.append(port)
                        self._need_room(port, len(change.packets))
                    self._publish_output(port, change.packets)
                if change.notify:
                    self._notify(change.job_id, change.direction, is_received=port is not None and bool(port.received))
            case changes.Connect():
                self._connect(change)
            case changes.Publish():
                self._publish(change.channel, change.value, change.context, change.options)

    def _connect(self, change: changes.Connect) -> None:
        """Move the packets of a port to others; the jobs are locked, so no other transaction changes them meanwhile.

        Raises Moved if one of the ports was deleted, or has other channels, since it was read without locks.
        """
        source, *targets = [self._port(key) for key in (change.source, *change.targets)]
        now = ports.by_id(self._executor, [port.id for port in (source, *targets)])
        for port in (source, *targets):
            if port.id not in now or not _has_channels_of(now[port.id], port):
                raise Moved(f"port {port.name!r} of job {port.job_id} changed before it was locked")
        moved = self._move_packets(change.source, now[source.id], [now[port.id] for port in targets])
        default = now[source.id].default_value
        for key, port in zip(change.targets, targets, strict=True):
            self._publish_output(port, [(row.value, row.context, row.options) for row in moved])
            if moved and change.notify:
                self._notify(port.job_id, port.direction, is_received=bool(now[port.id].received))
            if default is not None:
                self._set_default(key, default, notify=change.notify and not moved)

    def _move_packets(self, key: changes.PortKey, source: Any, targets: Sequence[Any]) -> Sequence[Any]:
        """Move the packets of a port to others that have room, and return them."""
        if source.packet_limit is not None:
            room.lock(self._executor, [source.id])  # a run may be marking the packets, and they would be passed over
        moved = packets.move(self._executor, source.id, [port.id for port in targets])
        for row in moved:  # they are returned, so an undecodable packet must be an error before the commit
            value_of(row, key)
        self.moved += moved
        self.have_read(room.limited(moved))
        for port in targets if moved else ():
            self._need_room(port, len(moved))
        self._check_room(written=True)
        return moved

    def flush(self) -> None:
        """Store the packets, in the order in which they were written, and keep the messages of channels.

        The messages also reach ports that subscribe in this transaction. If a port was deleted, which would lose its
        packets, or has other channels by now, no reader is notified and the transaction is repeated.
        """
        if self._rows:
            self._check_room()
            self._write_rows()
        if self._messages:
            self._keep_messages()
        make_room(self._executor, self._read, self._after_commit)

    def _write_rows(self) -> None:
        found = packets.write(self._executor, self._rows)
        for port in self._written:
            now = found.get(port.id)
            if now is None or now.packet_limit != port.packet_limit or not _has_channels_of(now, port):
                raise Moved(f"port {port.name!r} of job {port.job_id} changed before it was locked")
        self._rows, self._written = [], []

    # -- limits --------------------------------------------------------------------------------------------------

    def have_read(self, port_ids: Iterable[int]) -> None:
        """Note that this transaction has removed packets from ports with a limit."""
        self._read.update(port_ids)

    def _need_room(self, port: Any, count: int) -> None:
        if port.packet_limit is not None and self._bounded:
            self._needs[port.id] = self._needs.get(port.id, 0) + count
            self._limited[port.id] = port

    def _check_room(self, *, written: bool = False) -> None:
        """Raise PortFullError if a port has no room for the packets to be written to it, or just `written`.

        The jobs of the ports are locked, so no other transaction writes. A borrowed transaction locks none: it does not
        see uncommitted packets of others, and the port may get more packets than its limit.
        """
        if not self._needs:
            return
        used = room.used(self._executor, self._needs)
        full = []
        for port_id, needs in self._needs.items():
            port, before = self._limited[port_id], used[port_id] - needs * written
            if before + needs > port.packet_limit:
                named = port.id, port.job_id, port.direction, port.name, port.packet_limit
                full.append(FullPort(*named, before, needs))
        self._needs = {}
        if full:
            raise port_full(tuple(full))

    def _port(self, key: changes.PortKey) -> Any:
        """Return the row of the port; the first use of a port that the task allows by `"*"` creates it."""
        job_id, direction, name = key
        if key in self._lock_set.ports:
            return self._lock_set.ports[key]
        pattern = self._lock_set.ports.get((job_id, direction, WILDCARD))
        if pattern is None:
            known = [(side, other) for owner_id, side, other in self._lock_set.ports if owner_id == job_id]
            raise port_not_found(job_id, direction, name, known)
        return self._changed(ports.make(self._executor, pattern.id, name))

    def _changed(self, row: Any | None) -> Any:
        """Record a port's present row; raises Moved if another client has made, deleted or replaced it meanwhile."""
        if row is None:
            raise Moved("a port was made or taken away before its job was locked")
        self._lock_set.set_port(row)
        self._after_commit.ports_changed([row])
        return row

    def _set_default(self, key: changes.PortKey, value: str | None, *, notify: bool) -> None:
        row = self._changed(ports.set_default(self._executor, self._port(key).id, value))
        if notify and row.changed:
            self._notify(row.job_id, row.direction)

    def _publish_output(self, port: Any, written: Iterable[tuple[str, str | None, str | None]]) -> None:
        for name in port.channels if port.direction == "out" else ():
            for value, context, _ in written:
                self._publish(name, value, context)

    def _publish(self, name: str, value: str, context: str | None, options: str | None = None) -> None:
        self._after_commit.announcements.append((name, value))
        with_channel = json.dumps({**(json.loads(context) if context else {}), "channel": name})
        self._messages.setdefault(name, []).append((value, with_channel, options))

    def _keep_messages(self) -> None:
        """Keep messages for the subscribers of their channels; deliver them to a few subscribers at once."""
        for kept in publications.keep(self._executor, self._messages, few=FEW):
            self._after_commit.published[kept.channel] = kept.ports
            if kept.page is None or not deliver_to(
                kept.channel, kept.page, self._lock_set, self._wakes, noting=self._lock_set.noting
            ):
                self._after_commit.undelivered.add(kept.channel)

    def _notify(self, job_id: int, direction: changes.Direction, *, is_received: bool = False) -> None:
        """Wake the reader of a port; a late packet for a `receive`, or for a parent, does not restart steps."""
        reader = job_id if direction == "in" else self._lock_set.parents.get(job_id)
        if reader is None:
            return
        self._wakes.wake(reader, looks=is_received or direction == "out")


def _has_channels_of(now: Any, port: Any) -> bool:
    return bool(port.direction == "in" or now.channels == port.channels)


def _key(change: changes.Write | changes.SetDefault | changes.SetChannels | changes.MarkReceived) -> changes.PortKey:
    return (change.job_id, change.direction, change.port)


def make_room(executor: Transaction, port_ids: Collection[int], after_commit: AfterCommit) -> None:
    """Ask the jobs that wait for room that now exists; they are not locked, so the asks are only noted.

    A job that finds such a port full checks again under this lock, so it sees the removal, or is seen here.
    """
    if port_ids:
        room.lock(executor, port_ids)
        note_asks(executor, room.freed(executor, port_ids), after_commit)


def wait_for_room(executor: Transaction, hold: Hold, full: Sequence[FullPort], after_commit: AfterCommit) -> bool:
    """Make the run that ends in this transaction wait for room on ports; False if all have room by now.

    A reader that makes room asks the job to run. Raises PortFullError if the job would wait for itself: another job
    waits for room on a port that only this job reads, and this job waits for that other job.

    A deleted port counts as having room, because the run must learn of the deletion.
    """
    limits = room.lock(executor, [port.id for port in full])
    room.mark(executor, limits)
    used = room.used(executor, limits)
    needs = {
        port.id: port.needs
        for port in full
        if (limit := limits.get(port.id)) is not None and used[port.id] + port.needs > limit
    }
    if not needs:
        return False
    room.wait(executor, hold.job_id, run_no=hold.run_no, needs=needs)
    other = room.circle(executor, hold.job_id, run_no=hold.run_no)
    if other is not None:
        raise facing_ports([port for port in full if port.id in needs], hold.job_id, other)
    if hold.row.waited_for_room:
        make_room(executor, needs.keys(), after_commit)  # some room was kept for this job, which now needs more
    return True


def note_asks(executor: Transaction, job_ids: Collection[int], after_commit: AfterCommit) -> None:
    """Note that these jobs, which are not locked, must run."""
    if job_ids:
        asks.note(executor, job_ids, "run")
        after_commit.noted += job_ids


def add_ports(executor: Transaction, job_id: int, new: Sequence[changes.PortRow], after_commit: AfterCommit) -> None:
    """Give a job the ports of another task that it does not have yet; its own ports and their packets stay."""
    if not new:
        return
    there = {(row.direction, row.name) for row in ports.of_jobs(executor, [job_id])}
    lacking = [port_row(job_id, port) for port in new if (port.direction, port.name) not in there]
    if lacking:
        after_commit.ports_changed(ports.put(executor, lacking))


def port_row(job_id: int, port: changes.PortRow) -> dict[str, Any]:
    """Return a port in the form that the store expects."""
    return {"job_id": job_id, **asdict(port)}


def deliver_to(channel: str, page: Page, lock_set: LockSet, wakes: Wakes, *, noting: bool) -> bool:
    """Deliver a page, and have its jobs woken by `wakes`; do nothing and return False if a transaction is in the way.

    It never waits. A locked job gets its packets all the same, and its ask is noted. If a job or a port may be about to
    be removed, the whole page waits for later.

    `noting`: all asks are only noted.
    """
    executor = lock_set.executor
    if not noting:
        lock_set.add(jobs.lock(executor, page.job_ids, waits=False))
    late = {job_id for job_id in page.job_ids if noting or not lock_set.knows(job_id)}
    if late and late != jobs.keep(executor, late, waits=False):
        return False
    delivered = publications.deliver(executor, channel, page)
    for job_id, is_woken in sorted((delivered or {}).items()):
        wakes.wake(job_id, looks=not is_woken, noted=job_id in late)
    return delivered is not None

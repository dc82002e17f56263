"""What ports, channels and runs promise, in memory: the plain model with which the store is compared.

Clients act one after the other. A run keeps what it does in a `Unit` until that is committed. Packets are `(value,
context)`; two equal ones are told apart by identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.twins.real import Refused


class _None:
    """Is one object, also after a copy."""

    def __deepcopy__(self, memo: Any) -> _None:
        return self

    def __repr__(self) -> str:
        return "NONE"


NONE: Any = _None()
"""No default, and no data; null is a value."""
TASK_PORTS = [("in", "a"), ("in", "b"), ("out", "o")]
ASKABLE = ("queued", "running", "suspended", "completed")

Key = tuple[int, str, str]
"""(job, direction, name)."""
Packet = list[Any]
Options = dict[str, dict[str, Any]]


class Ended(Exception):
    """A run is over: `suspended`, `failed`, or `crashed`."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


def ancestors(channel: str) -> list[str]:
    """The channel and those above it."""
    names = channel.strip("/").split("/")
    return ["/" + "/".join(names[:count]) for count in range(len(names), 0, -1)] + ["/"]


@dataclass
class Port:
    """A mailbox."""

    default: Any = NONE
    channels: list[str] = field(default_factory=list)
    packets: list[Packet] = field(default_factory=list)


@dataclass
class Node:
    """A job."""

    parent: int | None
    ports: dict[tuple[str, str], Port] = field(default_factory=lambda: {key: Port() for key in TASK_PORTS})
    status: str = "queued"
    asked: bool = False
    """Whether it was asked to run since its run began."""
    memo: dict[Any, Any] = field(default_factory=dict)


class World:
    """Jobs, and what bodies entered into a table of their own."""

    def __init__(self, parents: Sequence[int | None]) -> None:
        self.jobs = [Node(parent) for parent in parents]
        self.effects: list[Any] = []
        self._kept: dict[str, list[Packet]] = {}

    # -- ports ---------------------------------------------------------------------------------------------------

    def port(self, key: Key, *, make: bool = False) -> Port:
        """The port, or one like the pattern that allows it."""
        job, direction, name = key
        ports = self.jobs[job].ports
        if (direction, name) in ports:
            return ports[direction, name]
        if (direction, "*") not in ports:
            raise Refused("PortNotFoundError")
        made = Port(ports[direction, "*"].default)
        if make:
            ports[direction, name] = made
        return made

    def set_default(self, key: Key, value: Any) -> None:
        self.port(key, make=True).default = value

    def set_channels(self, key: Key, names: Sequence[str]) -> None:
        self.port(key, make=True).channels = list(dict.fromkeys(names))

    def configure(self, job: int, direction: str, given: Options) -> None:
        """Leave of a direction the task's own ports and the given ones; those that stay keep their packets."""
        before = self.jobs[job].ports
        of_task: Options = {name: {} for side, name in TASK_PORTS if side == direction}
        self.jobs[job].ports = {key: port for key, port in before.items() if key[0] != direction} | {
            (direction, name): Port(
                options.get("default", NONE),
                options.get("channels", []),
                before.get((direction, name), Port()).packets,
            )
            for name, options in (of_task | given).items()
        }

    def write(
        self, key: Key, values: Sequence[Any], context: dict[str, Any], *, notify: bool = True, as_default: bool = False
    ) -> None:
        """Append packets, and publish those of an output port; or set the default to the last value."""
        port = self.port(key, make=True)
        if notify:
            self.ask(key[0] if key[1] == "in" else self.jobs[key[0]].parent)
        if as_default:
            port.default = values[-1]
            return
        port.packets += [[value, context] for value in values]
        for name in port.channels if key[1] == "out" else ():
            for value in values:
                self.publish(name, value, context)

    def publish(self, channel: str, value: Any, context: dict[str, Any]) -> int:
        """Keep a message for the input ports that subscribe to the channel or to one above it; return how many."""
        self._kept.setdefault(channel, []).append([value, {**context, "channel": channel}])
        return sum(bool(set(port.channels) & set(ancestors(channel))) for _, port in self._inputs())

    def deliver(self) -> None:
        """Write what is kept to its subscribers, channel by channel, once for each level a port subscribes to."""
        kept, self._kept = self._kept, {}
        for channel, messages in kept.items():
            for job, port in self._inputs():
                times = len(set(port.channels) & set(ancestors(channel)))
                port.packets += [list(message) for message in messages for _ in range(times)]
                if times:
                    self.ask(job)

    def _inputs(self) -> Iterator[tuple[int, Port]]:
        for job, node in enumerate(self.jobs):
            for (direction, _), port in node.ports.items():
                if direction == "in":
                    yield job, port

    def connect(self, source: Key, targets: Sequence[Key]) -> list[Any]:
        """Move all packets to each target, and copy the default to them; return the values."""
        for key in (source, *targets):
            self.port(key)  # all are there, or nothing happens
        port, *others = [self.port(key, make=True) for key in (source, *targets)]
        moved, port.packets = port.packets, []
        for key, target in zip(targets, others, strict=True):
            target.packets += [list(packet) for packet in moved]
            for name in target.channels if key[1] == "out" else ():
                for value, context in moved:
                    self.publish(name, value, context)
            before = target.default
            if port.default is not NONE:
                target.default = port.default
            if moved or (before is NONE) is not (target.default is NONE) or before != target.default:
                self.ask(key[0] if key[1] == "in" else self.jobs[key[0]].parent)
        return [value for value, _ in moved]

    def read(self, key: Key) -> Any:
        """Remove the oldest packet, and return its value; the default of an empty port."""
        port = self.port(key)
        return port.packets.pop(0)[0] if port.packets else port.default

    # -- jobs ----------------------------------------------------------------------------------------------------

    def ask(self, job: int | None, *, force: bool = False) -> None:
        """Have a job run, if there is one and it may."""
        if job is not None and (force or self.jobs[job].status in ASKABLE):
            self.jobs[job].asked = True
            self.jobs[job].status = "queued"


@dataclass
class Unit:
    """What a run has read and will write."""

    read: list[Packet] = field(default_factory=list)
    changes: list[tuple[Any, ...]] = field(default_factory=list)
    """("write", key, values, {options}), ("publish", channel, value), ("default", key, value)."""
    memo: dict[Any, Any] | None = None

    @property
    def has_inputs(self) -> bool:
        """Whether it has read packets, or is a turn of defaults alone."""
        return bool(self.read) or self.memo is not None

    @property
    def empty(self) -> bool:
        return not (self.has_inputs or self.changes)

    def copy(self) -> Unit:
        return Unit(list(self.read), list(self.changes), self.memo)


class Run:
    """One run: what it sees of the world and of its own unit."""

    def __init__(self, world: World, job: int) -> None:
        self.world = world
        self.job = job
        self.unit = Unit()
        self.taken: list[tuple[Key, Packet]] = []
        """What it has read of output ports: others do not find that while it runs."""
        self.undone: str | None = None
        """After a block that was not committed: "inputs" if packets were read for it, else "nothing read"."""
        node = world.jobs[job]
        node.status, node.asked = "running", False

    # -- reading -------------------------------------------------------------------------------------------------

    def default(self, key: Key) -> Any:
        """The port's default as the unit leaves it."""
        found, made = self._stored(key), self._stored(key) is not None
        value = found.default if found is not None else NONE
        for change in self.unit.changes:
            is_default = change[0] == "default" or (change[0] == "write" and change[3]["as_default"])
            if is_default and change[1] == key:
                value, made = (change[2] if change[0] == "default" else change[2][-1]), True
        if not made:
            raise Refused("PortNotFoundError")
        return value

    def _stored(self, key: Key) -> Port | None:
        try:
            return self.world.port(key)
        except Refused:
            return None

    def waiting(self, key: Key) -> list[Packet]:
        """The packets that a read would find: stored ones, then the unit's own."""
        found = self._stored(key)
        read = {id(packet) for packet in self.unit.read}
        return [packet for packet in (found.packets if found else ()) if id(packet) not in read]

    def _written(self, key: Key) -> list[Any] | None:
        """The first list of values that this unit writes to the port, if any is left."""
        for kind, *rest in self.unit.changes:
            if kind == "write" and rest[0] == key and rest[1] and not rest[2]["as_default"]:
                return rest[1]  # type: ignore[no-any-return]
        return None

    def has_packet(self, key: Key) -> bool:
        return bool(self.waiting(key) or self._written(key))

    def read(self, key: Key) -> Any:
        """Read a port as part of the unit."""
        if self.undone == "inputs":
            raise Refused("UnitNotCommittedError")
        self.undone = None
        if stored := self.waiting(key):
            self.unit.read.append(stored[0])
            if key[1] == "out":
                self.taken.append((key, stored[0]))
            return stored[0][0]
        if (written := self._written(key)) is not None:
            return written.pop(0)
        return self.default(key)

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, *change: Any) -> None:
        """Have the unit make a change; it must name a port that is there."""
        if change[0] != "publish":
            self.default(change[1])
        if self.undone != "inputs":
            self.undone = None
        self.unit.changes.append(change)

    # -- committing ----------------------------------------------------------------------------------------------

    def commit(self, *, block: bool = False) -> None:
        """Apply the unit: what was read goes, then defaults are set, then packets are written."""
        if not block and self.undone == "inputs":
            raise Refused("UnitNotCommittedError")
        unit, self.unit, self.undone = self.unit, Unit(), None
        read = {id(packet) for packet in unit.read}
        for node in self.world.jobs:
            for port in node.ports.values():
                port.packets = [packet for packet in port.packets if id(packet) not in read]
        if unit.memo is not None:
            self.world.jobs[self.job].memo = unit.memo
        context = {"job": self.job}
        is_object = [
            change[0] == "default" or (change[0] == "write" and change[3]["as_default"]) for change in unit.changes
        ]
        objects = [change for change, first in zip(unit.changes, is_object, strict=True) if first]
        data = [change for change, first in zip(unit.changes, is_object, strict=True) if not first]
        for kind, *rest in objects + data:
            if kind == "default":
                self.world.set_default(*rest)
            elif kind == "write":
                self.world.write(rest[0], rest[1], context, **rest[2])
            else:
                self.world.publish(*rest, context)
        self.world.deliver()

    def roll_back(self, before: Unit) -> None:
        """Learn that a block was not committed: the unit is again what it was before."""
        self.unit = before
        self.undone = "inputs" if before.has_inputs else "nothing read"

    # -- ending --------------------------------------------------------------------------------------------------

    def end(self, how: str) -> None:
        """End as completed or suspended with the unit, as failed without it."""
        node = self.world.jobs[self.job]
        if how != "failed":
            self.commit()
        node.status = "queued" if node.asked else how
        self.world.ask(node.parent)

    def crash(self) -> None:
        """Be lost, and rescued: the parents of jobs whose packets are free again may have found none."""
        self.world.jobs[self.job].status = "queued"
        for key, packet in self.taken:
            reader = self.world.jobs[key[0]].parent
            if reader != self.job and any(packet is left for left in self.world.port(key).packets):
                self.world.ask(reader)

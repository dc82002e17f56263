"""Every interleaving of a run that writes to a port with a limit, its readers, and a change of that limit.

A packet that was written before the port had a limit may be committed late. It does not tell its reader of the limit
until somebody marks it: that reader looks for nobody who waits.

Transactions are taken apart into their statements: each sees what is committed when it begins, a lock is held until the
end, and a process may die in between. Rules are those of `store/room.py`; each of `MISTAKES` is what one is tempted to
do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol_model.walk import replace

MISTAKES = (
    "the run does not count again", "it counts before it locks", "a reader does not lock",
    "a reader looks before it locks", "a reader asks after its commit", "another limit asks nobody",
    "another limit asks without a lock", "a run marks nothing", "a reader marks nothing",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What is committed, and how far each transaction has come."""

    packets: int = 1
    limit: int = 1
    waits: bool = False
    """The row of `port_waiters`."""
    noted: bool = False
    """The ask of the writer, to be applied by anybody."""
    holder: str | None = None
    """Who has locked the port's row."""
    writer: str = "runs"
    """The writer: runs, refused, counted (before its lock), locked, sleepy, sleeps, written."""
    reader: str = "idle"
    """A reader: idle, deleted, looked or passed (before its lock), locked, marked, asks, leaves, late (with an ask
    after its commit), gone."""
    late: str = "unwritten"
    """The packet without a mark: unwritten, there, taken (by a reader that has not committed), gone. Once it is marked,
    it is one of the others."""
    owner: str = "will change"
    """Who may raise the limit: will change, locked, asks, leaves, gone."""
    deaths: int = 2

    @property
    def used(self) -> int:
        """How many packets a count finds."""
        return self.packets + (self.late in ("there", "taken"))


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.noted:
        yield replace(world, noted=False, writer="runs" if world.writer == "sleeps" else world.writer)
    yield from _writer(world, mistake)
    yield from _reader(world, mistake)
    yield from _owner(world, mistake)
    yield from _late(world)


def _writer(world: World, mistake: str | None) -> Iterator[World]:
    full, free = world.used >= world.limit, world.holder is None
    match world.writer:
        case "runs" if full:
            yield replace(world, writer="refused")
        case "runs":
            yield replace(world, packets=world.packets + 1, writer="written")
        case "refused" if mistake == "the run does not count again":
            yield replace(world, writer="sleepy")
        case "refused" if mistake == "it counts before it locks":
            yield replace(world, writer="counted" if full else "runs")
        case "refused" if free:
            yield replace(world, writer="locked", holder="writer")
        case "counted" if free:
            yield replace(world, writer="sleepy", holder="writer")
        case "locked" if world.late in ("there", "taken") and mistake != "a run marks nothing":
            yield from _mark(world)
        case "locked":
            yield replace(world, writer="sleepy") if full else replace(world, writer="runs", holder=None)
        case "sleepy":
            yield replace(world, writer="sleeps", waits=True, holder=_without(world, "writer"))
    if world.deaths and world.writer in ("refused", "counted", "locked", "sleepy"):  # and the run is rescued
        yield replace(world, writer="runs", holder=_without(world, "writer"), deaths=world.deaths - 1)


def _reader(world: World, mistake: str | None) -> Iterator[World]:
    match world.reader:
        case "idle":
            yield replace(world, reader="gone")
            if world.packets:
                yield replace(world, reader="deleted")
        case "deleted" if mistake == "a reader does not lock":
            yield replace(world, reader="asks" if world.waits else "leaves")
        case "deleted" if mistake == "a reader looks before it locks":
            yield replace(world, reader="looked" if world.waits else "passed")
        case "looked" | "passed" if world.holder is None:
            yield replace(world, reader="asks" if world.reader == "looked" else "leaves", holder="reader")
        case "deleted" if world.holder is None:
            yield replace(world, reader="locked", holder="reader")
        case "locked" | "marked" if world.waits and world.used <= world.limit:
            yield replace(world, reader="asks")
        case "locked" if world.waits and mistake != "a reader marks nothing":
            yield from _mark(replace(world, reader="marked"))
        case "locked" | "marked":
            yield replace(world, reader="leaves")
        case "asks" if mistake == "a reader asks after its commit":
            yield replace(_read(world), reader="late", waits=False)
        case "asks":
            yield replace(_read(world), waits=False, noted=True)
        case "leaves":
            yield _read(world)
        case "late":
            yield replace(world, reader="idle", noted=True)
    if world.deaths and world.reader not in ("idle", "gone"):
        yield replace(world, reader="idle", holder=_without(world, "reader"), deaths=world.deaths - 1)


def _mark(world: World) -> Iterator[World]:
    """Mark the packet that has no mark; this waits for a reader who has taken it."""
    if world.late == "there":
        yield replace(world, packets=world.packets + 1, late="gone")
    elif world.late != "taken":
        yield world


def _late(world: World) -> Iterator[World]:
    """The packet without a mark comes, or never; a reader takes it, and looks for nobody who waits."""
    match world.late:
        case "unwritten":
            yield replace(world, late="there")
            yield replace(world, late="gone")
        case "there":
            yield replace(world, late="taken")
        case "taken":
            yield replace(world, late="gone")
            if world.deaths:
                yield replace(world, late="there", deaths=world.deaths - 1)


def _read(world: World) -> World:
    return replace(world, packets=world.packets - 1, reader="idle", holder=_without(world, "reader"))


def _owner(world: World, mistake: str | None) -> Iterator[World]:
    if world.owner == "will change":
        yield replace(world, owner="gone")
    match world.owner:
        case "will change" if mistake == "another limit asks without a lock":
            yield replace(world, owner="asks" if world.waits else "leaves")
        case "will change" if world.holder is None:
            yield replace(world, owner="locked", holder="owner")
        case "locked":
            asks = world.waits and mistake != "another limit asks nobody"
            yield replace(world, owner="asks" if asks else "leaves")
        case "asks" | "leaves":
            changed = replace(world, owner="gone", limit=2, holder=_without(world, "owner"))
            yield replace(changed, waits=False, noted=True) if world.owner == "asks" else changed
    if world.deaths and world.owner in ("locked", "asks", "leaves"):
        yield replace(world, owner="will change", holder=_without(world, "owner"), deaths=world.deaths - 1)


def _without(world: World, who: str) -> str | None:
    return None if world.holder == who else world.holder


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen; where nobody reads any more, the writer may wait."""
    may_wait = world.writer == "sleeps" and world.waits and world.used >= world.limit
    return None if world.writer == "written" or may_wait else "the run waits for room that is there"

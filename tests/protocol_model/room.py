"""Every interleaving of two runs that write to a port with a limit, its readers, and a change of that limit.

The first writer is the odd one: in each run it may need more room than before, write elsewhere (or be terminated, which
is the same here), or be held up for ever before it begins. The second writes its packet.

A packet that was written before the port had a limit may be committed late. It does not tell its reader of the limit
until somebody marks it: that reader looks for nobody who waits.

Transactions are taken apart into their statements: each sees what is committed when it begins, a lock is held until the
end, and a process may die in between. The sweeper's transaction is one step: how long room is kept is not told, so it
may act at any time. Rules are those of `store/room.py`; each of `MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol_model.walk import replace

MISTAKES = (
    "the run does not count again", "it counts before it locks", "a reader does not lock",
    "a reader looks before it locks", "a reader asks after its commit", "another limit asks nobody",
    "another limit asks without a lock", "a run marks nothing", "a reader marks nothing",
    "the first in line is woken and forgotten", "nothing is passed on", "nobody sweeps",
    "the sweeper looks for ended runs alone", "the end of a run removes its row",
    "a run that waits again passes nothing on",
)  # fmt: skip

Line = tuple[tuple[int, int], ...]
"""Rows of `port_waiters`: (writer, needs)."""


@dataclass(frozen=True)
class World:
    """What is committed, and how far each transaction has come."""

    packets: int = 2
    limit: int = 2
    line: Line = ()
    """The rows of those who wait, in the order in which they began."""
    woken: Line = ()
    """The rows of those who were asked: room is kept for them."""
    noted: tuple[int, ...] = ()
    """The asks of writers, to be applied by anybody."""
    holder: str | None = None
    """Who has locked the port's row."""
    writers: tuple[str, str] = ("", "")
    """The writers: runs, refused, counted (before its lock), locked, sleepy, sleeps; ended (and something may be passed
    on), passing (with the lock), gone; held up."""
    needs: int = 1
    """The packets of the first writer's run; the second writes one."""
    reader: str = "idle"
    """A reader: idle, deleted, passed (before its lock), locked, marked, leaves, late (with asks after its
    commit), gone."""
    asks: Line = ()
    """The rows of those whom the reader asks with its commit."""
    late: str = "unwritten"
    """The packet without a mark: unwritten, there, taken (by a reader that has not committed), gone. Once it is marked,
    it is one of the others."""
    owner: str = "gone"
    """Who may raise the limit: will change, locked, leaves, gone."""
    owner_asks: Line = ()
    """The rows of those whom the owner asks with its commit."""
    deaths: int = 1

    @property
    def used(self) -> int:
        """How many packets a count finds."""
        return self.packets + (self.late in ("there", "taken"))


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next: the limit changes for one writer, or there are two."""
    if world == World():
        yield replace(world, writers=("runs", "gone"), owner="will change", deaths=2)
        yield replace(world, writers=("runs", "runs"))
        return
    for writer in world.noted:
        noted = tuple(other for other in world.noted if other != writer)
        state = world.writers[writer]
        yield replace(world, noted=noted, writers=_with(world, writer, "runs" if state == "sleeps" else state))
    yield from _writer(world, 0, mistake)
    yield from _writer(world, 1, mistake)
    yield from _odd(world, mistake)
    yield from _reader(world, mistake)
    yield from _owner(world, mistake)
    yield from _late(world)
    yield from _sweeper(world, mistake)


def _writer(world: World, writer: int, mistake: str | None) -> Iterator[World]:
    me, needs = f"writer {writer}", 1 if writer else world.needs
    full, free = world.used + needs > world.limit, world.holder is None

    def now(state: str, **changes: object) -> World:
        return replace(world, writers=_with(world, writer, state), **changes)

    match world.writers[writer]:
        case "runs" if full:
            yield now("refused")
        case "runs":
            yield _ended(replace(world, packets=world.packets + needs), writer, mistake)
        case "refused" if mistake == "the run does not count again":
            yield now("sleepy")
        case "refused" if mistake == "it counts before it locks":
            yield now("counted" if full else "runs")
        case "refused" if free:
            yield now("locked", holder=me)
        case "counted" if free:
            yield now("sleepy", holder=me)
        case "locked" if world.late in ("there", "taken") and mistake != "a run marks nothing":
            yield from _mark(world)
        case "locked":
            yield now("sleepy") if full else now("runs", holder=None)
        case "sleepy":
            woken = _others(world.woken, writer)
            waits = now("sleeps", line=(*_others(world.line, writer), (writer, needs)), woken=woken)
            waits = replace(waits, holder=_without(world, me))
            passes = woken != world.woken and mistake != "a run that waits again passes nothing on"
            yield from _freed(waits, writer) if passes else (waits,)
        case "ended" if free:
            yield now("passing", holder=me)
        case "passing":
            rest = now("gone", line=_others(world.line, writer), woken=_others(world.woken, writer), holder=None)
            yield from _freed(rest)
    state = world.writers[writer]
    if world.deaths and state in ("refused", "counted", "locked", "sleepy"):  # and the run is rescued
        yield now("runs", holder=_without(world, me), deaths=world.deaths - 1)
    if world.deaths and state in ("ended", "passing"):
        yield now("gone", holder=_without(world, me), deaths=world.deaths - 1)


def _odd(world: World, mistake: str | None) -> Iterator[World]:
    if world.writers[0] == "runs":
        yield _ended(world, 0, mistake)
        yield replace(world, writers=_with(world, 0, "held up"))
        if world.needs == 1:
            yield replace(world, needs=2)


def _ended(world: World, writer: int, mistake: str | None) -> World:
    """End a run: if its job has a row, something may be passed on after this commit."""
    if mistake == "the end of a run removes its row":
        had_row = world.line + world.woken != _others(world.line + world.woken, writer)
        world = replace(world, line=_others(world.line, writer), woken=_others(world.woken, writer))
    else:
        had_row = any(row[0] == writer for row in world.line + world.woken)
    passes = had_row and mistake not in ("nothing is passed on", "the first in line is woken and forgotten")
    return replace(world, writers=_with(world, writer, "ended" if passes else "gone"))


def _fits(world: World, leaver: int | None = None) -> Line:
    """Return the rows of those to be woken: as many as fit, in their order, beside those who were woken already."""
    room = world.limit - world.used - sum(needs for _, needs in world.woken)
    rows, total = (), 0
    for row in world.line:
        if row[0] != leaver and world.writers[row[0]] == "sleeps" and row[1] <= room:
            total += row[1]
            rows += (row,) if total <= room else ()
    return rows


def _woken(world: World, rows: Line) -> World:
    """Ask those whose rows these are; room is kept for them."""
    return replace(
        world,
        line=tuple(row for row in world.line if row not in rows),
        woken=world.woken + tuple(row for row in rows if row not in world.woken),
        noted=tuple(sorted({*world.noted, *(writer for writer, _ in rows)})),
    )


def _reader(world: World, mistake: str | None) -> Iterator[World]:
    looked = replace(world, asks=_fits(replace(world, packets=world.packets - 1)))
    match world.reader:
        case "idle":
            yield replace(world, reader="gone")
            if world.packets:
                yield replace(world, reader="deleted")
        case "deleted" if mistake == "a reader does not lock":
            yield replace(looked, reader="leaves")
        case "deleted" if mistake == "a reader looks before it locks":
            yield replace(looked, reader="passed")
        case "passed" if world.holder is None:
            yield replace(world, reader="leaves", holder="reader")
        case "deleted" if world.holder is None:
            yield replace(world, reader="locked", holder="reader")
        case "locked" if set(world.line) - set(looked.asks) and mistake != "a reader marks nothing":
            yield from _mark(replace(looked, reader="marked"))
        case "locked":
            yield replace(looked, reader="leaves")
        case "marked":  # with what it has found before the mark
            again = _fits(replace(_woken(world, world.asks), packets=world.packets - 1))
            yield replace(world, reader="leaves", asks=world.asks + again)
        case "leaves":
            read = replace(world, packets=world.packets - 1, reader="idle", asks=(), holder=_without(world, "reader"))
            if mistake == "a reader asks after its commit":
                asks = tuple(row for row in world.asks if row in world.line)
                yield replace(_without_rows(read, asks), reader="late" if asks else "idle", asks=asks)
            elif mistake == "the first in line is woken and forgotten":
                yield replace(_woken(read, world.asks[:1]), woken=())
            else:
                yield _woken(read, world.asks)
        case "late":
            noted = tuple(sorted({*world.noted, *(writer for writer, _ in world.asks)}))
            yield replace(world, reader="idle", asks=(), noted=noted)
    if world.deaths and world.reader not in ("idle", "gone"):
        yield replace(world, reader="idle", asks=(), holder=_without(world, "reader"), deaths=world.deaths - 1)


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


def _owner(world: World, mistake: str | None) -> Iterator[World]:
    if world.owner == "will change":
        yield replace(world, owner="gone")
    match world.owner:
        case "will change" if mistake == "another limit asks without a lock":
            yield replace(world, owner="leaves", owner_asks=world.line)
        case "will change" if world.holder is None:
            yield replace(world, owner="locked", holder="owner")
        case "locked":
            yield replace(
                world, owner="leaves", owner_asks=() if mistake == "another limit asks nobody" else world.line
            )
        case "leaves":
            changed = replace(world, owner="gone", limit=3, owner_asks=(), holder=_without(world, "owner"))
            yield replace(_woken(changed, world.owner_asks), woken=() if world.owner_asks else world.woken)
    if world.deaths and world.owner in ("locked", "leaves"):
        yield replace(
            world, owner="will change", owner_asks=(), holder=_without(world, "owner"), deaths=world.deaths - 1
        )


def _sweeper(world: World, mistake: str | None) -> Iterator[World]:
    """Room that was kept for too long is kept no longer; a row whose job has gone on is removed with it."""
    if world.holder is not None or mistake in ("nobody sweeps", "nothing is passed on"):
        return
    for row in world.woken:
        if mistake == "the sweeper looks for ended runs alone" and world.writers[row[0]] not in ("ended", "gone"):
            continue
        yield from _freed(_without_rows(world, (row,)))


def _freed(world: World, leaver: int | None = None) -> Iterator[World]:
    """Ask those for whom there is room; if others go on waiting, mark first, and look again."""
    asked = _woken(world, _fits(world, leaver))
    for marked in _mark(asked) if asked.line else (asked,):
        yield _woken(marked, _fits(marked, leaver))


def _others(rows: Line, writer: int) -> Line:
    return tuple(row for row in rows if row[0] != writer)


def _without_rows(world: World, rows: Line) -> World:
    return replace(
        world,
        line=tuple(row for row in world.line if row not in rows),
        woken=tuple(row for row in world.woken if row not in rows),
    )


def _with(world: World, writer: int, state: str) -> tuple[str, str]:
    return (state, world.writers[1]) if writer == 0 else (world.writers[0], state)


def _without(world: World, who: str) -> str | None:
    return None if world.holder == who else world.holder


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen; where nobody reads any more, a writer may wait."""
    for writer, state in enumerate(world.writers):
        needs = dict(world.line).get(writer)
        may_wait = state == "sleeps" and needs is not None and world.used + needs > world.limit
        if state not in ("gone", "held up") and not may_wait:
            return "a run waits for room that is there"
    return None

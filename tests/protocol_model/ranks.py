"""Every interleaving of a queue that becomes managed, the pages that rank what waits in it, and deaths in between.

What is armed in a queue that nobody manages has no rank. Whoever makes a queue managed (a pause, `configure`, a
declaration) ranks what waits in it, in pages. A page passes over a row that somebody has locked. Only a look at all
rows that has passed over none marks the queue as ranked; until then the sweeper looks again. A row whose transaction
was open when the queue became managed may be committed after the last page: it gets its rank when its message comes to
the closed gate. (With an open gate its message begins it at once.)

Each of `MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol_model.walk import replace

MISTAKES = (
    "a pause ranks nobody", "nobody looks again", "the queue is marked before its pages",
    "a locked row counts as ranked", "a gate ranks nobody",
)  # fmt: skip

IDLE = (-1, False)
LATE = 2
"""The row whose transaction is open for long."""


@dataclass(frozen=True)
class World:
    """What is committed, and how far each look has come."""

    queue: str = "unmanaged"
    """The queue: unmanaged, managed, ranked (marked as such)."""
    rows: tuple[str, ...] = ("unranked", "unranked", "open")
    """Of each job: open (armed before the queue was managed, and not committed), unranked, at the gate, ranked."""
    locked: int = 1
    """The row that a client has locked; -1 for none."""
    looks: tuple[tuple[int, bool], ...] = (IDLE, IDLE)
    """Of whoever manages the queue, and of the sweeper: the next row, and whether one was passed over."""
    deaths: int = 2


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.queue == "unmanaged":
        looks = IDLE if mistake == "a pause ranks nobody" else (0, False)
        marked = mistake in ("a pause ranks nobody", "the queue is marked before its pages")
        yield replace(world, queue="ranked" if marked else "managed", looks=(looks, IDLE))
        return
    if world.locked >= 0:
        yield replace(world, locked=-1)
    if world.rows[LATE] == "open":
        yield _with(world, LATE, "unranked")
    if world.rows[LATE] == "unranked":  # its message comes; the messages of the others may be lost
        yield _with(world, LATE, "at the gate" if mistake == "a gate ranks nobody" else "ranked")
    for who, look in enumerate(world.looks):
        yield from _look(world, who, look, mistake)


def _look(world: World, who: int, look: tuple[int, bool], mistake: str | None) -> Iterator[World]:
    place, missed = look
    if look == IDLE:
        if who == 1 and world.queue == "managed" and mistake != "nobody looks again":
            yield _looks(world, who, (0, False))
        return
    if world.deaths:
        yield replace(_looks(world, who, IDLE), deaths=world.deaths - 1)
    if place == len(world.rows):
        yield replace(_looks(world, who, IDLE), queue=world.queue if missed else "ranked")
    elif world.rows[place] not in ("unranked", "at the gate"):
        yield _looks(world, who, (place + 1, missed))
    elif place == world.locked:
        passed_over = mistake != "a locked row counts as ranked"
        yield _looks(world, who, (place + 1, missed or passed_over))
    else:
        yield _looks(_with(world, place, "ranked"), who, (place + 1, missed))


def _with(world: World, place: int, row: str) -> World:
    return replace(world, rows=(*world.rows[:place], row, *world.rows[place + 1 :]))


def _looks(world: World, who: int, look: tuple[int, bool]) -> World:
    return replace(world, looks=(*world.looks[:who], look, *world.looks[who + 1 :]))


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen."""
    return None if set(world.rows) == {"ranked"} else f"what waits has no rank for ever: {world.rows}"

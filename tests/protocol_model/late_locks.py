"""Every interleaving of runs that begin without a lock with copies, deaths, a revocation and a new call of the same id.

The message of a call is delivered twice without a sign of it, and as a marked copy whenever its row waits: nobody knows
that something runs. Processes write their locks and removals at any time, or die before; one answer is lost. Once the
row is gone somebody may call the task again under the same id. The rules are those of `operations/deferred_locks.py`;
each of `MISTAKES` is what one is tempted to do instead. Who is told apart by the store is a process, here a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.protocol_model.walk import replace

MISTAKES = (
    "remove whoever has it", "remove of any age", "lock whoever has it", "lock of any age", "copies lock late",
    "follow without a lock", "leave what was doomed", "take back a later call", "take back an earlier call",
)  # fmt: skip


DEATHS = 1


class Slot(NamedTuple):
    """What one process runs."""

    state: str
    """Idle, unlocked, locked, refused, ended (well, and not removed yet)."""
    born: int = 0
    """Of which call its message is: the last when it began, so that no younger row was there."""
    again: bool = False
    """It has begun with a marked copy."""


@dataclass(frozen=True)
class World:
    """What the store holds, and where everybody stands."""

    call: int = 1
    """Of which call the row is, or was."""
    row: str = "waits"
    """Waits, held, gone."""
    holder: int | None = None
    doomed: bool = False
    first: int = 2
    """Deliveries of the last call that look like its first."""
    slots: tuple[Slot, ...] = (Slot("idle"), Slot("idle"))
    revoker: bool = True
    deaths: int = DEATHS
    answers: int = 1
    """How many may be lost."""
    # What was promised; no rule looks at these, but for the dead set.
    done: tuple[int, int] = (0, 0)
    """Of each call, how often it has ended well as far as is known."""
    dead: tuple[str | None, str | None] = (None, None)
    followed: tuple[int, int] = (0, 0)
    stored: tuple[bool, bool] = (False, False)
    broken: str | None = None


def steps(world: World, mistake: str | None, on_lost: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.broken:
        return
    if world.revoker:
        yield replace(world, revoker=False, doomed=world.row != "gone")
    if world.row == "waits" and world.doomed:  # the sweeper
        yield _gone(world, None, world.call, dead="revoked")
    if world.row == "gone" and world.call == 1:
        yield replace(world, call=2, row="waits", first=1)
    for place in range(len(world.slots)):
        yield from _of(world, place, mistake)


def _of(world: World, place: int, mistake: str | None) -> Iterator[World]:
    slot = world.slots[place]
    idle = _at(world, place, Slot("idle"))
    if slot.state == "idle":
        if world.first:
            yield replace(_at(world, place, Slot("unlocked", world.call)), first=world.first - 1)
        if world.row == "waits" and not world.doomed:
            begun = _at(world, place, Slot("unlocked", world.call, again=True))
            yield begun if mistake == "copies lock late" else _locked(begun, place)
        return
    if world.deaths:
        died = replace(idle, deaths=world.deaths - 1)
        if slot.again and slot.state == "unlocked":
            died = replace(died, broken="a death of what was published again is not counted")
        yield replace(died, row="waits", holder=None) if world.holder == place else died
    if slot.state == "ended":
        yield from _removed(world, place, mistake)
        return
    stored = replace(world, stored=_with(world.stored, slot.born - 1, True))
    yield _at(stored, place, Slot("ended", slot.born))  # well, and nothing follows
    locked = _takes(world, place, mistake)
    if slot.state == "unlocked":
        yield locked  # the flush
    yield from _otherwise(locked, place, mistake)


def _takes(world: World, place: int, mistake: str | None) -> World:
    """The run has its lock written, or finds that it cannot have it."""
    slot = world.slots[place]
    if slot.state != "unlocked":
        return world
    free = world.row == "waits" or (world.row == "held" and mistake == "lock whoever has it")
    if free and not world.doomed and (world.call <= slot.born or mistake == "lock of any age"):
        return _locked(world, place)
    return _at(world, place, Slot("refused", slot.born))


def _otherwise(world: World, place: int, mistake: str | None) -> Iterator[World]:
    """The run fails, or something follows it; its lock was asked for before."""
    born = world.slots[place].born
    idle = _at(world, place, Slot("idle"))
    if world.holder == place:
        yield _gone(idle, place, born, dead="failed")
        yield _gone(idle, place, born, follows=True)
        return
    yield idle
    if mistake == "follow without a lock":
        yield replace(idle, followed=_plus(idle.followed, born - 1))
    else:
        yield _taken_back(idle, born, mistake, follows=True)


def _removed(world: World, place: int, mistake: str | None) -> Iterator[World]:
    """What has ended well is removed, if nobody else has it and it was there."""
    born = world.slots[place].born
    free = world.row == "waits" and not (world.doomed and mistake == "leave what was doomed")
    forced = world.row == "held" and mistake == "remove whoever has it"
    was_there = world.call <= born or mistake == "remove of any age"
    if world.holder == place or ((free or forced) and was_there):
        removed = _gone(world, place, born)
        if world.answers:
            yield replace(removed, answers=world.answers - 1)  # it will do the same again
    else:
        removed = world if mistake == "leave what was doomed" else _taken_back(world, born, mistake)
    yield _at(removed, place, Slot("idle"))


def _taken_back(world: World, born: int, mistake: str | None, *, follows: bool = False) -> World:
    """The run does not hold the row, and has ended well: it leaves the dead set, or a row that nobody holds."""
    if world.row == "waits" and world.call <= born:
        return _gone(world, None, born, follows=follows)
    first = 1 if mistake == "take back an earlier call" else born
    last = 2 if mistake == "take back a later call" else born
    dead = [place for place in range(first - 1, last) if world.dead[place] == "revoked"]
    if dead:  # the newest entry
        back = replace(world, dead=_with(world.dead, dead[-1], None), done=_plus(world.done, born - 1))
        return replace(back, followed=_plus(back.followed, born - 1)) if follows else back
    return world


def _locked(world: World, place: int) -> World:
    if world.holder not in (None, place):
        return replace(world, broken="what a run holds is locked by another")
    return replace(_at(world, place, Slot("locked", world.slots[place].born)), row="held", holder=place)


def _gone(world: World, place: int | None, born: int, *, dead: str | None = None, follows: bool = False) -> World:
    """The row is removed by a run, for which it is done or dead, or by the sweeper."""
    if world.holder not in (None, place):
        return replace(world, broken="what a run holds is removed by another")
    gone = replace(world, row="gone", holder=None, doomed=False)
    if dead is not None:
        return replace(gone, dead=_with(world.dead, born - 1, dead))
    gone = replace(gone, done=_plus(world.done, born - 1))
    return replace(gone, followed=_plus(world.followed, born - 1)) if follows else gone


def _at(world: World, place: int, slot: Slot) -> World:
    return replace(world, slots=_with(world.slots, place, slot))


def _plus(several: tuple[int, int], place: int) -> tuple[int, int]:
    return _with(several, place, several[place] + 1)


def _with(several: Any, place: int, one: Any) -> Any:
    return (*several[:place], one, *several[place + 1 :])


def wrong(world: World) -> str | None:
    """Say what must not be, where nothing more can happen or something was broken on the way."""
    if world.broken:
        return world.broken
    for place in range(world.call):
        done, dead = world.done[place], world.dead[place]
        if done > 1:
            return "it has counted twice"
        if done and dead:
            return "it is in the dead set, and has succeeded"
        if world.stored[place] and dead == "revoked" and world.deaths == DEATHS:
            return "it is in the dead set, and its result is stored"
        if not done and dead is None:
            return "it is lost"
        if world.followed[place] > done:
            return "what follows it goes out for a run that does not count"
    return None

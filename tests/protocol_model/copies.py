"""Every interleaving of two copies of one durable task's message, in two stores that answer.

The publisher has given its message to the first store, heard nothing, and gives it to the second at some time, or dies
before. Sweepers publish the first copy, twice at a time if they like; processes die wherever they stand, or the first
copy expires. Rules are those of `operations/deduplication.py`; each of `MISTAKES` is what one is tempted to do
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.protocol_model.walk import replace

MISTAKES = ("ask first", "only look", "begin without a note", "leave the note", "bury without a note")


@dataclass(frozen=True)
class World:
    """What the stores hold, and where everybody stands."""

    first: str = "waits"
    """The first store's row: waits, locked, doomed, gone."""
    begun: bool = False
    """The first store's note that its copy has begun, or was buried."""
    second: str = "none"
    """The second store's row: none, waits, locked, doomed, gone."""
    note: str = "none"
    """The second store's note: none, tried (the first may have a copy), settled (that one gives way)."""
    publisher: bool = True
    """Whether it may still give the message to the second store."""
    deliveries: tuple[str, str] = ("new", "new")
    """Of the first copy: new, asks, gives way, runs, over; may lock, where asking comes first."""
    burial: str = "idle"
    """Of the first copy: idle, gives way, buries."""
    run: str = "idle"
    """Of the second copy: idle, asks, gives way, runs."""
    second_burial: str = "idle"
    """Of the second copy: idle, gives way, buries."""
    deaths: int = 2
    """How many processes may yet die."""
    done: int = 0
    dead: int = 0


def steps(world: World, mistake: str | None, on_lost: str) -> Iterator[World]:
    """Yield what may be next."""
    lost = "waits" if on_lost == "requeue" else "doomed"
    if world.publisher:
        yield replace(world, publisher=False)
        yield replace(world, publisher=False, second="waits", note="tried")
    if world.first == "waits":
        yield replace(world, first="doomed")  # it has expired
    for place in range(len(world.deliveries)):
        yield from _first(world, place, mistake, lost)
    yield from _first_burial(world, mistake)
    yield from _second(world, mistake, lost)
    yield from _second_burial(world, mistake)


def _first(world: World, place: int, mistake: str | None, lost: str) -> Iterator[World]:
    def at(there: str, **changes: Any) -> World:
        one, two = world.deliveries
        return replace(world, deliveries=(one, there) if place else (there, two), **changes)

    where = world.deliveries[place]
    noted = {} if mistake == "begin without a note" else {"begun": True}
    may_die = world.deaths and where in ("asks", "gives way", "runs")
    if may_die and (mistake != "ask first" or where == "runs"):
        yield at("over", first=lost, deaths=world.deaths - 1)
    match where:
        case "new" if mistake == "ask first":
            yield at("gives way", note="settled") if world.note != "none" else at("may lock")
        case "may lock":
            yield at("runs", first="locked", **noted) if world.first == "waits" else at("over")
        case "new":
            yield at("asks", first="locked", **noted) if world.first == "waits" else at("over")
        case "asks":
            yield at("gives way", note=_settled(world, mistake)) if world.note != "none" else at("runs")
        case "gives way":
            yield at("over", begun=False, first="gone")
        case "runs":
            yield at("over", first="gone", done=world.done + 1)
        case "over" if world.first == "waits":
            yield at("new")


def _first_burial(world: World, mistake: str | None) -> Iterator[World]:
    if world.deaths and world.burial != "idle":
        yield replace(world, burial="idle", deaths=world.deaths - 1)
    match world.burial:
        case "idle" if world.first == "doomed":
            gives_way = world.note != "none"
            note = _settled(world, mistake) if gives_way else world.note
            yield replace(world, burial="gives way" if gives_way else "buries", note=note)
        case "gives way":
            yield replace(world, burial="idle", begun=False, first="gone")
        case "buries":
            begun = world.begun or mistake != "bury without a note"
            yield replace(world, burial="idle", first="gone", begun=begun, dead=world.dead + 1)


def _second(world: World, mistake: str | None, lost: str) -> Iterator[World]:
    if world.deaths and world.run != "idle":
        yield replace(world, run="idle", second=lost, deaths=world.deaths - 1)
    match world.run:
        case "idle" if world.second == "waits":
            yield replace(world, run="asks", second="locked")
        case "asks":
            taken, begun = _taken(world, mistake)
            yield replace(taken, run="gives way" if begun else "runs")
        case "gives way":
            given = _gives_way(world, mistake)
            yield replace(given or world, run="idle" if given else "runs")
        case "runs":
            yield replace(world, run="idle", second="gone", done=world.done + 1)


def _second_burial(world: World, mistake: str | None) -> Iterator[World]:
    match world.second_burial:
        case "idle" if world.second == "doomed":
            taken, begun = _taken(world, mistake)
            yield replace(taken, second_burial="gives way" if begun else "buries")
        case "gives way":
            given = _gives_way(world, mistake)
            yield replace(given or world, second_burial="idle" if given else "buries")
        case "buries":
            yield replace(world, second_burial="idle", second="gone", dead=world.dead + 1)


def _settled(world: World, mistake: str | None) -> str:
    """The first copy is about to give way: it says so in the second store, or only looks there."""
    return world.note if mistake == "only look" else "settled"


def _taken(world: World, mistake: str | None) -> tuple[World, bool]:
    """The second copy removes the first, or finds that it has begun."""
    if world.first == "waits":
        return replace(world, first="gone", begun=world.begun and mistake == "leave the note"), False
    return world, world.begun or world.first != "gone"


def _gives_way(world: World, mistake: str | None) -> World | None:
    """The second copy is removed, unless the first has given way to it."""
    if world.note == "tried" or mistake == "only look":
        return replace(world, second="gone", note="none")
    return None


def wrong(world: World) -> str | None:
    """Say what must not be at the end, when nothing more can happen."""
    if world.done > 1:
        return "it has run twice"
    if world.dead > 1:
        return "it is in the dead set twice"
    if world.done and world.dead:
        return "it is in the dead set, and has succeeded"
    if not world.done and not world.dead:
        return "it is lost"
    return None

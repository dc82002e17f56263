"""Every interleaving of one durable task's runs with its revocation, its losses and its burial.

Workers begin what is delivered, end it well or badly, have it retried, give it back or die; a silent one is called
lost, and its body goes on. Somebody revokes the task at any time, or it expires, two sweepers bury what is doomed, and
a person takes it out of the dead set once. Rules are those of `store/outbox/holds.py`, `burials.py` and
`revocation.py` beside it; each of `MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.protocol_model.walk import replace

MISTAKES = (
    "take back what was lost alone", "take back from another run", "take back any generation", "a loss forgets",
    "a retry forgets", "to give back forgets", "who discards it tells", "tell before it is buried",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What the store holds, and where everybody stands."""

    row: str = "waits"
    """The row: waits, held, gone."""
    holder: int | None = None
    generation: int = 1
    doom: str | None = None
    entry: tuple[str, int] | None = None
    """The dead set's entry: why, and of which generation."""
    runs: tuple[int | None, int | None] = (None, None)
    """Of two workers: the generation of which each runs the body."""
    sweepers: tuple[tuple[str, int] | None, ...] = (None, None)
    """What each sweeper has read and is about to bury: why, and of which generation."""
    revoker: bool = True
    """Whether somebody may still revoke it."""
    heard: bool = False
    """Whether workers have been told of a revocation, which they then remember."""
    person: bool = True
    """Whether somebody may still take it out of the dead set."""
    losses: int = 2
    """How many runs may yet be lost, with their process or without."""
    returns: int = 1
    """How many runs may yet end in a retry, or in a message that is given back."""
    # What was promised; no rule looks at these.
    kept: bool = False
    """Who revoked it was told that it does not begin any more."""
    last: int | None = None
    """Who has begun last, since it was called or taken out of the dead set."""
    done: int = 0
    told: int = 0
    """How often it was told that it was revoked."""
    broken: str | None = None


def steps(world: World, mistake: str | None, on_lost: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.broken:
        return
    if world.revoker:
        for heard in (True, False):
            yield _revoked(replace(world, revoker=False, heard=heard))
    if world.row == "waits" and world.doom is None:
        yield replace(world, doom="expired")
    for worker in (0, 1):
        if world.runs[worker] is None:
            yield from _delivered(world, worker, mistake)
        else:
            yield from _over(world, worker, mistake)
            yield from _lost(world, worker, mistake, on_lost)
    for place in (0, 1):
        yield from _sweeps(world, place, mistake)
    if world.entry is not None and world.person:
        yield replace(
            world, row="waits", doom=None, generation=world.entry[1] + 1, entry=None, person=False, kept=False,
            last=None, told=0,
        )  # fmt: skip


def _revoked(world: World) -> World:
    """It is doomed, where it is; what is finished, or doomed already, is left as it is."""
    if world.row == "gone" or world.doom is not None:
        return world
    return replace(world, doom="revoked", kept=True)


def _delivered(world: World, worker: int, mistake: str | None) -> Iterator[World]:
    if world.row != "waits" or world.doom is not None:
        return
    if world.heard:  # the worker remembers the revocation, discards the message, and sees to it that this is kept
        told = world.told + (mistake == "who discards it tells")
        yield replace(_revoked(world), told=told)
        return
    broken = "it has begun after it was revoked" if world.kept else None
    runs = _with(world.runs, worker, world.generation)
    yield replace(world, row="held", holder=worker, runs=runs, last=worker, broken=broken)


def _over(world: World, worker: int, mistake: str | None) -> Iterator[World]:
    """The body has ended, well or badly, or the message is to be delivered again."""
    generation = world.runs[worker]
    over = replace(world, runs=_with(world.runs, worker, None))
    if world.holder != worker:
        yield over  # badly
        yield _takes_back(over, worker, generation, mistake)
        return
    gone = replace(over, row="gone", holder=None)
    yield replace(gone, done=world.done + 1)
    yield replace(gone, entry=("failed", world.generation))
    if world.returns:
        waits = replace(over, row="waits", holder=None, returns=world.returns - 1)
        yield replace(waits, doom=None if mistake == "to give back forgets" else world.doom)
        doom = None if mistake == "a retry forgets" else world.doom
        yield replace(waits, doom=doom, generation=world.generation + 1)


def _takes_back(world: World, worker: int, generation: int | None, mistake: str | None) -> World:
    """The run has ended well, and is not the one that holds the row."""
    reasons = {"lost"} if mistake == "take back what was lost alone" else {"lost", "revoked", "expired"}
    any_generation = mistake == "take back any generation"
    free = world.row == "waits" or (world.row == "held" and mistake == "take back from another run")
    row = free and (any_generation or world.generation == generation) and (world.doom or "lost") in reasons
    entry = world.entry is not None and world.entry[0] in reasons and (any_generation or world.entry[1] == generation)
    counts = world.last == worker and not world.done
    if not row and not entry:
        return replace(world, broken="a success is dropped, and no other run counts") if counts else world
    done = replace(world, done=world.done + 1)
    if row:
        done = replace(done, row="gone", holder=None)
    if entry:
        done = replace(done, entry=None)
    superseded = world.row == "held" or world.last is None
    return replace(done, broken="what counts is another run, or to come") if superseded else done


def _lost(world: World, worker: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """The run is called lost: its process has died, or its worker is silent and the body goes on."""
    died = replace(world, runs=_with(world.runs, worker, None))
    if world.holder != worker:
        yield died
        return
    if not world.losses:
        return
    doom = "lost" if on_lost == "dead" else None
    kept = doom if mistake == "a loss forgets" else world.doom or doom
    taken: dict[str, Any] = {"row": "waits", "holder": None, "doom": kept, "losses": world.losses - 1}
    yield replace(died, **taken)
    yield replace(world, **taken)


def _sweeps(world: World, place: int, mistake: str | None) -> Iterator[World]:
    read = world.sweepers[place]
    if read is None:
        if world.row == "waits" and world.doom is not None:
            told = world.told + (mistake == "tell before it is buried" and world.doom == "revoked")
            yield replace(world, sweepers=_with(world.sweepers, place, (world.doom, world.generation)), told=told)
        return
    reason, generation = read
    idle = replace(world, sweepers=_with(world.sweepers, place, None))
    if world.row != "waits" or world.generation != generation:
        yield idle
        return
    told = world.told + (reason == "revoked" and mistake != "tell before it is buried")
    yield replace(idle, row="gone", doom=None, entry=read, told=told)


def _with(several: tuple[Any, ...], place: int, one: Any) -> tuple[Any, ...]:
    return (*several[:place], one, *several[place + 1 :])


def wrong(world: World) -> str | None:
    """Say what must not be, where nothing more can happen or something was broken on the way."""
    if world.broken:
        return world.broken
    if world.done > 1:
        return "it has counted twice"
    if world.done and world.entry is not None:
        return "it is in the dead set, and has succeeded"
    if not world.done and world.entry is None:
        return "it is lost"
    if world.told > 1:
        return "it was told twice that it was revoked"
    if world.entry is not None and world.entry[0] == "revoked" and not world.told:
        return "nobody was told that it was revoked"
    return None

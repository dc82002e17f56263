"""Every interleaving of asks, runs, deaths and time of a job whose runs have a rate.

A tick is the time in which the bucket gets one token. What the store keeps of the bucket is `opens`, the moment from
which a run may begin; the bucket itself is a ghost, which the protocol never looks at. Each transaction is one step,
because all of them hold the lock of the job. Rules are those of `store/outbox/arming.py` and `store/claims.py`; each of
`MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol_model.walk import replace

BURST = 2
"""Tokens in a full bucket."""
FULL = 1 - BURST
"""`opens` of a full bucket."""

MISTAKES = (
    "a later ask arms the row again", "a forced run opens the gate", "a forced run is not counted",
    "the end of a run looks at no rate", "a claim takes no token", "a claim fills the bucket",
    "an ask moves the gate", "a lost run keeps its token", "a lost run gives two tokens back",
    "a shutdown waits for the rate", "a shutdown takes a token", "a refused run keeps its token",
    "a refused run waits for the rate",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What is committed, and what may still come."""

    policy: str = ""
    """What happens to a run beyond the rate: delay or terminate."""
    opens: int = FULL
    """In how many ticks a run may begin; below 1 it may now."""
    tokens: int = BURST
    """A ghost: what is in the bucket."""
    row: int | None = None
    """In how many ticks the row of the next run is due; None if no run is owed, or one is in progress."""
    run: str = ""
    """The run in progress: run, forced, shutdown, or refused (claimed beyond the rate)."""
    asked: str = ""
    """Asked since the claim: run or force."""
    forced: bool = False
    """Whether the row is for a forced run; only a mistake looks at it."""
    owed: bool = False
    """A ghost: whether a run is owed that begins after now."""
    terminating: bool = False
    terminated: bool = False
    asks: int = 3
    forces: int = 1
    terminations: int = 1
    deaths: int = 2
    fault: str = ""
    """What must never be."""


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if not world.policy:
        yield replace(world, policy="delay")
        yield replace(world, policy="terminate")
    elif not world.fault:
        yield from map(_judged, (*_time(world), *_clients(world, mistake), *_runs(world, mistake)))


def _judged(world: World) -> World:
    if world.row and world.tokens and not world.terminating:
        return replace(world, fault="a run waits although the bucket has a token")
    if world.row and world.terminating:
        return replace(world, fault="a shutdown waits for the rate")
    return world


def _time(world: World) -> Iterator[World]:
    later = replace(
        world, opens=max(world.opens - 1, FULL), tokens=min(world.tokens + 1, BURST),
        row=world.row and max(world.row - 1, 0),
    )  # fmt: skip
    if later != world:
        yield later


def _gate(world: World) -> int:
    """Return in how many ticks a run is due that is owed now."""
    return max(world.opens, 0) if world.policy == "delay" else 0


def _clients(world: World, mistake: str | None) -> Iterator[World]:
    if world.asks and not world.terminating and not world.terminated:
        moved = replace(world, opens=world.opens + 1) if mistake == "an ask moves the gate" else world
        yield _ask(replace(moved, asks=world.asks - 1), "run", again=mistake == "a later ask arms the row again")
    if world.forces:
        asked = _ask(replace(world, forces=world.forces - 1, terminated=False), "force", again=False)
        yield replace(asked, row=0) if mistake == "a forced run opens the gate" and asked.row else asked
    if world.terminations and not world.terminated:
        ended = _terminate(replace(world, terminations=world.terminations - 1))
        waits = mistake == "a shutdown waits for the rate" and not world.run
        yield replace(ended, row=_gate(ended)) if waits else ended


def _ask(world: World, how: str, *, again: bool) -> World:
    if world.terminating and how == "run":
        return world
    if world.run or world.terminating:
        return replace(world, asked=how, owed=True)
    row = _gate(world) if world.row is None else 0 if again else world.row
    return replace(world, row=row, owed=True, forced=world.forced or how == "force")


def _terminate(world: World) -> World:
    return replace(world, terminating=True, asked="", owed=False, forced=False, row=None if world.run else 0)


def _runs(world: World, mistake: str | None) -> Iterator[World]:
    match world.run:
        case "" if world.row == 0 and world.terminating:
            taken = 1 if mistake == "a shutdown takes a token" else 0
            yield replace(world, run="shutdown", row=None, opens=max(world.opens, FULL) + taken)
        case "" if world.row == 0:
            yield _claim(world, mistake)
        case "run" | "forced":
            yield _end(world, mistake)
            if world.deaths:
                yield _lost(replace(world, deaths=world.deaths - 1), mistake)
        case "refused":
            if world.terminating:
                yield _given_back(world, mistake)
            else:
                yield _terminate(world)
            if world.deaths:
                yield _given_back(replace(world, deaths=world.deaths - 1), mistake)
        case "shutdown":
            over = replace(world, run="", terminating=False, terminated=not world.asked, asked="")
            yield replace(over, row=_gate(over)) if world.asked else over
            if world.deaths:
                yield replace(world, deaths=world.deaths - 1, run="", row=0)


def _claim(world: World, mistake: str | None) -> World:
    refused = world.policy == "terminate" and world.opens > 0
    counts = not (mistake == "a forced run is not counted" and world.forced)
    opens = max(world.opens, FULL) + (counts and mistake != "a claim takes no token")
    if mistake == "a claim fills the bucket":
        opens = FULL + 1
    run = "refused" if refused else "forced" if world.forced else "run"
    begun = replace(world, run=run, row=None, opens=opens, forced=False)
    if refused:
        return replace(begun, fault="a run within the rate is refused") if world.tokens else begun
    if not world.tokens:
        return replace(begun, fault="a run begins beyond the rate")
    return replace(begun, tokens=world.tokens - 1, owed=False)


def _end(world: World, mistake: str | None) -> World:
    over = replace(world, run="", asked="")
    if world.terminating:
        return replace(over, asked=world.asked, row=0)
    if not world.asked:
        return over
    row = 0 if mistake == "the end of a run looks at no rate" else _gate(over)
    return replace(over, row=row, forced=world.asked == "force")


def _lost(world: World, mistake: str | None) -> World:
    """The run is rescued: it begins again, and is counted once."""
    back = {"a lost run keeps its token": 0, "a lost run gives two tokens back": 2}.get(mistake or "", 1)
    over = replace(world, run="", asked="", opens=world.opens - back, tokens=min(world.tokens + 1, BURST))
    if world.terminating:
        return replace(over, asked=world.asked, row=0)
    return replace(over, row=_gate(over), owed=True)


def _given_back(world: World, mistake: str | None) -> World:
    """A run that was refused gives back what its claim has taken; it is judged anew if it was not terminated."""
    kept = mistake == "a refused run keeps its token"
    over = replace(world, run="", opens=world.opens - (not kept))
    row = max(over.opens, 0) if mistake == "a refused run waits for the rate" else 0
    return replace(over, row=row)


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen."""
    if world.fault:
        return world.fault
    return "a run is owed, and never begins" if world.owed else None

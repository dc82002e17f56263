"""Every interleaving of a worker that parks a job, whose task it does not know, and one that comes to know the task.

Transactions are taken apart into their statements: each sees what is committed when it begins, the turn is held until
the end, and a process may die in between. Rules are those of `store/parked.py`; each of `MISTAKES` is what one is
tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

MISTAKES = (
    "nobody takes turns", "who parks takes no turn", "who serves takes no turn", "who parks does not look",
    "who serves releases nothing", "it looks before its turn",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What is committed, and how far each transaction has come."""

    job: str = "sent"
    """Its message: sent (on its way to a worker), held by the parker, parked, missing (nobody has it, the sweeper sends
    it again), or the job has run."""
    served: bool = False
    """Whether a live worker has recorded that it serves the task."""
    turn: str | None = None
    """Who has the advisory lock."""
    parker: str = "idle"
    """The worker that does not know the task: idle, received, looked (before its turn), in turn, parks, leaves."""
    server: str = "starts"
    """The worker that does: starts, in turn, serves or releases (not committed), there."""
    deaths: int = 2


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    yield from _message(world)
    yield from _parker(world, mistake)
    yield from _server(world, mistake)


def _message(world: World) -> Iterator[World]:
    match world.job:
        case "missing":
            yield replace(world, job="sent")
        case "sent":
            if world.parker == "idle":
                yield replace(world, parker="received", job="held")
            if world.server == "there":
                yield replace(world, job="has run")


def _parker(world: World, mistake: str | None) -> Iterator[World]:
    free = world.turn is None
    no_turn = mistake in ("nobody takes turns", "who parks takes no turn")
    served = world.served and mistake != "who parks does not look"
    match world.parker:
        case "received" if mistake == "it looks before its turn":
            yield replace(world, parker="leaves" if served else "looked")
        case "received" if no_turn:
            yield replace(world, parker="leaves" if served else "parks")
        case "received" if free:
            yield replace(world, parker="in turn", turn="parker")
        case "looked" if free:
            yield replace(world, parker="parks", turn="parker")
        case "in turn":
            yield replace(world, parker="leaves" if served else "parks")
        case "parks":
            yield replace(world, parker="idle", job="parked", turn=_without(world, "parker"))
        case "leaves":
            yield replace(world, parker="idle", job="missing", turn=_without(world, "parker"))
    if world.deaths and world.parker != "idle":  # and another worker like it is there
        yield replace(world, parker="idle", job="missing", turn=_without(world, "parker"), deaths=world.deaths - 1)


def _server(world: World, mistake: str | None) -> Iterator[World]:
    free = world.turn is None
    no_turn = mistake in ("nobody takes turns", "who serves takes no turn")
    match world.server:
        case "starts" if no_turn:
            yield _serves(world, mistake)
        case "starts" if free:
            yield replace(world, server="in turn", turn="server")
        case "in turn":
            yield _serves(world, mistake)
        case "serves" | "releases":
            job = "missing" if world.server == "releases" and world.job == "parked" else world.job
            yield replace(world, server="there", served=True, job=job, turn=_without(world, "server"))
        case "there" if world.deaths and world.job != "has run":
            yield replace(world, server="starts", served=False, deaths=world.deaths - 1)
    if world.deaths and world.server in ("in turn", "serves", "releases"):
        yield replace(world, server="starts", turn=_without(world, "server"), deaths=world.deaths - 1)


def _serves(world: World, mistake: str | None) -> World:
    """See what is parked now; it is released by the commit."""
    sees = world.job == "parked" and mistake != "who serves releases nothing"
    return replace(world, server="releases" if sees else "serves")


def _without(world: World, who: str) -> str | None:
    return None if world.turn == who else world.turn


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen."""
    return None if world.job == "has run" else "the job is parked, and a live worker knows its task"

"""Every interleaving of a worker that parks a job or a durable task, one that announces its task, and a termination.

Transactions are taken apart into their statements: each sees what is committed when it begins, a lock is held until the
end, and a process may die in between. Rules are those of `store/parked.py` and `operations/waiting.py`; each of
`MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol_model.walk import replace

MISTAKES = (
    "parking takes no turn", "announcing takes no turn", "parking looks before its turn",
    "parking looks at no worker", "announcing releases after its commit", "announcing releases before it",
    "a message that is not parked is dropped", "a forced message is dropped", "a termination waits for ever",
    "parking does not lock the job", "parking looks at no status", "a parked task waits for ever",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What is committed, and how far each transaction has come."""

    kind: str = ""
    """Job, or task: an ordinary durable one, which nobody locks or terminates."""
    message: str = "sent"
    """Its message: sent (it is in the broker), lost (the sweeper will send it), parked, dropped (nobody will
    send it), gone (its run has ended)."""
    status: str = "queued"
    """Queued, terminating, completed, terminated (after its shutdown), skipped (without it), dead (a task's)."""
    ends: bool = False
    """Whether the parked job ends without its shutdown when its time is up."""
    turn: str = ""
    """Who has the turn: parker or announcer."""
    lock: str = ""
    """Who has locked the job: parker or client."""
    parker: str = "idle"
    """The worker without the task: idle, received, locked, turn, then what its statement has found: parks, parks
    terminating, or knows (a live worker with the task). `... early` where it looked before its turn."""
    announcer: str = ""
    """The worker with the task: will come (starts) or not (never), turn, saw parked or saw nothing, serves
    (committed); late or released, where it releases elsewhere by mistake; dead."""
    client: str = "idle"
    """Who terminates the job: idle, locked, saw parked or saw nothing (by its statement), gone."""
    forces: int = 1
    deaths: int = 2


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if not world.kind:
        yield replace(world, kind="job")
        yield replace(world, kind="task", client="gone", forces=0)
    elif not world.announcer:
        yield replace(world, announcer="starts")
        yield replace(world, announcer="never")
    elif world.status in ("queued", "terminating"):
        yield from _parker(world, mistake)
        yield from _announcer(world, mistake)
        yield from _client(world, mistake)
        yield from _sweeper(world, mistake)


def _parker(world: World, mistake: str | None) -> Iterator[World]:
    locks = world.kind == "job" and mistake != "parking does not lock the job"
    takes_turn = mistake != "parking takes no turn"
    match world.parker:
        case "idle" if world.message == "sent":
            yield replace(world, parker="received", message="lost")
        case "received" if not locks:
            yield replace(world, parker="locked")
        case "received" if not world.lock:
            yield replace(world, parker="locked", lock="parker")
        case "locked" if mistake == "parking looks before its turn":
            yield replace(world, parker=f"{_found(world, mistake)} early")
        case "locked" if not takes_turn:
            yield replace(world, parker=_found(world, mistake))
        case "locked" if not world.turn:
            yield replace(world, parker="turn", turn="parker")
        case "turn":
            yield replace(world, parker=_found(world, mistake))
        case early if early.endswith(" early") and not world.turn:
            yield replace(world, parker=early.removesuffix(" early"), turn="parker")
        case "parks" | "parks terminating" if world.message in ("lost", "sent"):
            yield _parker_over(replace(world, message="parked", ends=world.parker == "parks terminating"))
        case "knows" if mistake == "a message that is not parked is dropped" and world.message == "lost":
            yield _parker_over(replace(world, message="dropped"))
        case "knows" | "parks" | "parks terminating":
            yield _parker_over(world)
    if world.deaths and world.parker != "idle":  # the transaction is rolled back
        yield _parker_over(replace(world, deaths=world.deaths - 1))


def _found(world: World, mistake: str | None) -> str:
    """Return what the statement finds that parks."""
    if world.announcer in ("serves", "late") and mistake != "parking looks at no worker":
        return "knows"
    is_ending = world.status == "terminating" and mistake != "parking looks at no status"
    return "parks terminating" if is_ending else "parks"


def _parker_over(world: World) -> World:
    turn = "" if world.turn == "parker" else world.turn
    return replace(world, parker="idle", turn=turn, lock="" if world.lock == "parker" else world.lock)


def _announcer(world: World, mistake: str | None) -> Iterator[World]:
    saw = "saw parked" if world.message == "parked" else "saw nothing"
    match world.announcer:
        case "starts" if mistake == "announcing releases before it":
            yield replace(_released(world), announcer="released")
        case "released" if not world.turn:
            yield replace(world, announcer="serves")
        case "starts" if mistake == "announcing takes no turn":
            yield replace(world, announcer=saw)
        case "starts" if not world.turn:
            yield replace(world, announcer="turn", turn="announcer")
        case "turn" if mistake == "announcing releases after its commit":
            yield _announced(world, "late")
        case "late":
            yield replace(_released(world), announcer="serves")
        case "turn":
            yield replace(world, announcer=saw)
        case "saw parked":
            yield _announced(_released(world), "serves")
        case "saw nothing":
            yield _announced(world, "serves")
        case "serves" if world.message == "sent" and not world.lock:
            over = "terminated" if world.status == "terminating" else "completed"
            yield replace(world, message="gone", status=over)
        case "dead":  # its successor
            yield replace(world, announcer="starts")
    if world.deaths and world.announcer in ("turn", "saw parked", "saw nothing"):
        yield _announced(replace(world, deaths=world.deaths - 1), "starts")
    if world.deaths and world.announcer == "late":  # its fellow goes on
        yield replace(world, announcer="serves", deaths=world.deaths - 1)
    if world.deaths and world.announcer == "serves":
        yield replace(world, announcer="dead", deaths=world.deaths - 1)


def _released(world: World) -> World:
    return replace(world, message="lost", ends=False) if world.message == "parked" else world


def _announced(world: World, announcer: str) -> World:
    return replace(world, announcer=announcer, turn="" if world.turn == "announcer" else world.turn)


def _client(world: World, mistake: str | None) -> Iterator[World]:
    if world.client == "idle":
        yield replace(world, client="gone")
    match world.client:
        case "idle" if not world.lock:
            yield replace(world, client="locked", lock="client")
        case "idle" | "gone":
            return
        case "locked":
            yield replace(world, client="saw parked" if world.message == "parked" else "saw nothing")
        case saw:
            ends = saw == "saw parked" and mistake != "a termination waits for ever"
            yield replace(world, client="gone", lock="", status="terminating", ends=world.ends or ends)
    if world.deaths:
        yield replace(world, client="idle", lock="", deaths=world.deaths - 1)


def _sweeper(world: World, mistake: str | None) -> Iterator[World]:
    if world.message == "lost":
        yield replace(world, message="sent")
    if world.forces and world.message == "parked" and not world.lock:
        how = "dropped" if mistake == "a forced message is dropped" else "lost"
        yield replace(world, message=how, ends=False, forces=world.forces - 1)
    if world.ends and world.message == "parked" and world.status == "terminating" and not world.lock:
        yield replace(world, message="gone", status="skipped")
    if world.kind == "task" and world.message == "parked" and mistake != "a parked task waits for ever":
        yield replace(world, message="gone", status="dead")


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen; a job whose task nobody brings may wait."""
    if world.status not in ("queued", "terminating"):
        return None
    may_wait = world.announcer == "never" and world.message == "parked" and world.status == "queued"
    return (
        None
        if may_wait and world.kind == "job"
        else f"a {world.status} {world.kind} waits for ever: its message is {world.message}"
    )

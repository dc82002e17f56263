"""Every interleaving of two workers that fetch, hold, begin and end one row of the ledger.

Who fetches the message of a row holds the row, and then acknowledges the message. From then on the store alone knows
who has the run: the broker may deliver copies, workers die or are declared dead while they are only frozen, an answer
is lost, a person revokes the work or moves it by force, and its queue is closed for a time.

A row that may be repeated (`on_lost="requeue"`; jobs, too) is held when it is fetched, and its begin is not written. A
row that may not be repeated (`"dead"`), or has come back from a death, is held when a process is free: held means
begun. The main process of a worker remembers a hold until its end is in the store. Each of `MISTAKES` is a simpler
rule. `MISTAKES_OF_DEAD` are simpler rules that only a row which may not be repeated cannot bear.

The message is acknowledged once the answer is there that the row is held. A worker may also fetch from a broker that is
the store: there one statement takes the message, holds the row, and removes the message (`in_store`). Nobody asks
again for the answer of that statement if it is lost: its worker does not know what it holds.

The package holds the rows of durable tasks so. What differs for jobs is in `held_jobs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.protocol_model.walk import replace

MISTAKES = (
    "run what it remembers", "forget at the end", "end by the worker", "end of any hold", "hold when declared dead",
    "begin unwritten after a death", "give back without the mark", "count what had not begun",
    "note a gate that has opened", "look for nothing",
)  # fmt: skip
MISTAKES_OF_DEAD = ("hold in pages", "begin unwritten", "run again", "give back what is in flight")

MAX_LOSSES = 1
NONE, CURRENT, STALE = range(3)
"""What a worker takes for a hold: none, the row's newest hold, or a hold that is over. A hold's number is the fence."""


class Process(NamedTuple):
    """A process of the pool, and the hold that it works for."""

    state: str = "idle"
    """Idle, handed (the body has not begun), runs, ended (the body is over, and its end is not in the store)."""
    hold: int = NONE


class Worker(NamedTuple):
    """A worker: what its main process remembers, and what its pool does."""

    alive: bool = True
    declared: bool = False
    """Its death is in the store, for good. It may live all the same."""
    asks: str = "nothing"
    """What it asks for the message that it has fetched: nothing, hold (the statement is to be sent, perhaps again),
    sent (the statement has held the row, and the answer is on its way), fetched (so has the statement that has fetched
    the message, which is gone), closed (it saw the gate closed; a mistake)."""
    sent: int = NONE
    """The hold whose answer is on its way."""
    page: int = NONE
    """The hold of a row that waits here for a process."""
    over: int = NONE
    """A hold whose end is to be written, and which is no longer remembered; only a mistake."""
    pool: tuple[Process, ...] = (Process(),)

    def remembers(self) -> bool:
        """Tell whether it knows that it has the newest hold."""
        return CURRENT in (self.page, *(process.hold for process in self.pool))

    def free(self) -> int | None:
        """Return the place of a process that has nothing to do."""
        return next((place for place, process in enumerate(self.pool) if process.state == "idle"), None)

    def at(self, place: int, process: Process) -> Worker:
        """Return this worker with another process at a place."""
        return self._replace(pool=(*self.pool[:place], process, *self.pool[place + 1 :]))

    def outdated(self) -> Worker:
        """Return this worker once its hold is over, which it does not know."""
        sent, page, over = (STALE if hold else NONE for hold in (self.sent, self.page, self.over))
        pool = tuple(process._replace(hold=STALE) if process.hold else process for process in self.pool)
        return self._replace(sent=sent, page=page, over=over, pool=pool)


WORKERS = (Worker(pool=(Process(), Process())), Worker())


@dataclass(frozen=True)
class World:
    """What the store and the broker have, and where everybody stands."""

    row: str = "waits"
    """Waits, gated, held, begun, gone, dead."""
    holder: int | None = None
    tried: bool = False
    """It has come back from a death, so that its next begin is written."""
    losses: int = 0
    doomed: bool = False
    gate_open: bool = True
    in_store: bool = False
    """The broker is the store."""
    messages: int = 1
    """In the broker."""
    workers: tuple[Worker, ...] = WORKERS
    troubles: int = 2
    """How many may yet happen: a copy, a death, a freeze, a lost answer, a gate that closes, a revocation, a move."""
    # What was promised; no rule looks at these.
    bodies: int = 0
    deaths: int = 0
    """Of processes and workers, frozen ones too. A body that may be repeated is repeated as often at the most."""
    moves: int = 0
    """Each is a person's wish for one more body."""
    uncounted: int = 0
    """Deaths in a body since the last one that was counted."""
    done: int = 0
    broken: str | None = None

    def is_held_by(self, number: int) -> bool:
        """Tell whether a worker has the row, as the store knows it."""
        return self.row in ("held", "begun") and self.holder == number


def steps(world: World, mistake: str | None, on_lost: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.broken:
        return
    if world == World():
        yield World(in_store=True)
    yield from _others(world, mistake)
    for number, worker in enumerate(world.workers):
        if world.row in ("gone", "dead"):
            yield from _begins_late(world, number, mistake, on_lost)
            continue
        if not worker.alive and not worker.declared:
            yield _with(world, number, worker._replace(declared=True))
        if worker.declared:
            yield from _rescued(world, number, mistake, on_lost)
            if not world.is_held_by(number):  # it begins again, under another name
                again = worker._replace(declared=False) if worker.alive else WORKERS[number]
                yield _with(world, number, again)
        if worker.alive:
            yield from _asks(world, number, mistake, on_lost)
            yield from _gives_back(world, number, mistake)
            yield from _pool(world, number, mistake, on_lost)
            yield from _disasters(world, number)


def _begins_late(world: World, number: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """The row is over, and a worker may begin a body all the same."""
    worker = world.workers[number]
    if worker.sent:
        yield from _hears(world, number, worker.sent, mistake)
    for place, process in enumerate(worker.pool):
        if process.state == "handed":
            yield _begins(_with(world, number, worker.at(place, Process())), on_lost)


def _others(world: World, mistake: str | None) -> Iterator[World]:
    """Clients, the sweeper and the broker."""
    if world.row == "waits" and world.doomed:
        yield replace(world, row="dead")
    elif world.row == "waits" and not world.messages and not _is_asked_for(world):
        yield replace(world, messages=1)  # it was missing
    if world.troubles and world.row not in ("gone", "dead"):
        less = replace(world, troubles=world.troubles - 1)
        yield replace(less, messages=world.messages + 1)  # a copy
        if not world.doomed:
            yield replace(less, doomed=True)
        if world.row == "waits" and world.gate_open:
            yield replace(less, gate_open=False)
        if world.holder is not None:
            yield _waits(replace(less, moves=world.moves + 1, losses=0, uncounted=0), tried=False)
    if not world.gate_open:
        opened = replace(world, gate_open=True)
        yield _waits(opened, tried=world.tried) if world.row == "gated" else opened


def _is_asked_for(world: World) -> bool:
    return any(worker.alive and worker.asks != "nothing" for worker in world.workers)


def _asks(world: World, number: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """The main process fetches a message, and holds its row."""
    worker = world.workers[number]
    if worker.asks == "nothing" and world.messages:
        fetched = _with(replace(world, messages=world.messages - 1), number, worker._replace(asks="hold"))
        yield from _fetches(fetched, number, mistake, on_lost) if world.in_store else [fetched]
    elif worker.asks == "hold":
        yield from _holds(world, number, mistake, on_lost)
    elif worker.asks in ("sent", "fetched"):
        if world.troubles:
            unheard = replace(world, troubles=world.troubles - 1)
            asks = "hold" if worker.asks == "sent" else "nothing"
            yield _with(unheard, number, worker._replace(asks=asks, sent=NONE))
        yield from _hears(world, number, worker.sent, mistake)
    elif worker.asks == "closed":
        noted = replace(world, row="gated") if world.row == "waits" else world
        yield _with(noted, number, worker._replace(asks="nothing"))


def _fetches(world: World, number: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """The fetch holds the row and removes its message, or only takes the message: then the row is held later."""
    later = world.row != "waits" or world.doomed or _is_begun_by_its_hold(world, mistake, on_lost)
    if later or not world.gate_open or world.workers[number].declared:
        yield world
        return
    for held in _holds(world, number, mistake, on_lost):
        yield _with(held, number, held.workers[number]._replace(asks="fetched"))


def _holds(world: World, number: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """One statement holds the row, or says that the message is to be acknowledged and forgotten."""
    worker = world.workers[number]
    done = _with(world, number, worker._replace(asks="nothing"))
    remembered = worker.remembers() and mistake != "run what it remembers"
    if world.is_held_by(number) and not remembered:
        yield from _hears(world, number, CURRENT, mistake)  # the answer was lost
    elif world.row != "waits" or world.doomed:
        yield done
    elif worker.declared and mistake != "hold when declared dead":
        yield replace(done, messages=world.messages + 1)
    elif not world.gate_open and mistake == "note a gate that has opened":
        yield _with(world, number, worker._replace(asks="closed"))
    elif not world.gate_open:
        yield replace(done, row="gated")
    else:
        begun = _is_begun_by_its_hold(world, mistake, on_lost)
        has_room = worker.free() is not None if begun and mistake != "hold in pages" else not worker.page
        if has_room:
            held = replace(world, row="begun" if begun else "held", holder=number)
            yield _with(held, number, worker._replace(asks="sent", sent=CURRENT))


def _is_begun_by_its_hold(world: World, mistake: str | None, on_lost: str) -> bool:
    if on_lost == "dead":
        return mistake != "begin unwritten"
    return world.tried and mistake != "begin unwritten after a death"


def _hears(world: World, number: int, hold: int, mistake: str | None) -> Iterator[World]:
    """The main process learns that it has a hold, and acknowledges the message. The hold may be over since."""
    heard = world.workers[number]._replace(asks="nothing", sent=NONE)
    place = heard.free()
    if world.row == "held" or mistake == "hold in pages":
        if not heard.page:
            yield _with(world, number, heard._replace(page=hold))
    elif place is not None:
        yield _with(world, number, heard.at(place, Process("handed", hold)))


def _gives_back(world: World, number: int, mistake: str | None) -> Iterator[World]:
    """A worker that stops gives its page back, and its heart what it holds and does not remember."""
    worker = world.workers[number]
    if worker.page:
        stopped = _with(world, number, worker._replace(page=NONE))
        yield _waits(stopped, tried=world.tried) if _stands(world, number, worker.page) else stopped
    in_flight = worker.asks in ("hold", "sent", "fetched") and mistake != "give back what is in flight"
    looks = mistake != "look for nothing"
    if world.is_held_by(number) and not worker.remembers() and not in_flight and looks:
        yield _waits(world, tried=True)


def _pool(world: World, number: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """The processes begin, end and die."""
    worker = world.workers[number]
    free = worker.free()
    if worker.page and free is not None:
        yield _with(world, number, worker._replace(page=NONE).at(free, Process("handed", worker.page)))
    if worker.over:
        yield _ended(_with(world, number, worker._replace(over=NONE)), number, worker.over, mistake)
    for place, process in enumerate(worker.pool):
        idle = _with(world, number, worker.at(place, Process()))
        if process.state == "handed":
            runs = _with(world, number, worker.at(place, process._replace(state="runs")))
            yield _begins(runs, on_lost)
        elif process.state == "runs" and mistake == "forget at the end":
            yield _with(world, number, worker.at(place, Process())._replace(over=process.hold))
        elif process.state == "runs":
            yield _with(world, number, worker.at(place, process._replace(state="ended")))
        elif process.state == "ended":
            ended = _ended(idle, number, process.hold, mistake)
            yield ended
            if world.troubles and ended.row == "gone":  # it will write the same end again
                yield replace(ended, troubles=world.troubles - 1, workers=world.workers)
        if process.state in ("handed", "runs") and world.troubles:
            died = replace(idle, troubles=world.troubles - 1, deaths=world.deaths + 1)
            if _stands(world, number, process.hold):
                died = _body_dies(died, number, process)
                yield _lost(died, mistake, on_lost)
            else:
                yield died


def _begins(world: World, on_lost: str) -> World:
    bodies = world.bodies + 1
    excused = 1 + world.moves + (world.deaths if on_lost == "requeue" else 0)
    broken = "its body ran more often than it may" if bodies > excused else None
    return replace(world, bodies=bodies, broken=broken)


def _ended(world: World, number: int, hold: int, mistake: str | None) -> World:
    """The body ended well. That counts if its hold stands, or if nobody has the row."""
    stands = world.is_held_by(number) and (hold == CURRENT or mistake == "end by the worker")
    anyway = world.row in ("held", "begun") and mistake == "end of any hold"
    if not (stands or anyway or world.row in ("waits", "gated")):
        return world
    other = world.holder is not None and hold != CURRENT
    broken = "what another run holds is ended" if other else None
    return replace(world, row="gone", holder=None, done=world.done + 1, broken=broken)


def _disasters(world: World, number: int) -> Iterator[World]:
    """The worker dies as a whole, or is declared dead while it is frozen."""
    worker = world.workers[number]
    if not world.troubles:
        return
    happened = replace(world, troubles=world.troubles - 1, deaths=world.deaths + 1)
    if not worker.declared:
        yield _with(happened, number, worker._replace(declared=True))
    unacknowledged = worker.asks not in ("nothing", "fetched")  # so that the broker delivers the message again
    died = replace(happened, messages=world.messages + unacknowledged)
    for process in worker.pool:
        died = _body_dies(died, number, process)
    if world.row == "begun" and _stands(world, number, worker.page):
        died = replace(died, broken="work counts as begun for which no process was free")
    yield _with(died, number, Worker(alive=False, declared=worker.declared, pool=()))


def _body_dies(world: World, number: int, process: Process) -> World:
    if process.state != "runs" or world.row != "held" or not _stands(world, number, process.hold):
        return world
    uncounted = world.uncounted + 1
    return replace(world, uncounted=uncounted, broken="deaths in the body are never counted" if uncounted > 1 else None)


def _rescued(world: World, number: int, mistake: str | None, on_lost: str) -> Iterator[World]:
    """What a worker holds that is declared dead is given back, as often as the sweeper looks."""
    if world.is_held_by(number):
        yield _lost(world, mistake, on_lost)


def _lost(world: World, mistake: str | None, on_lost: str) -> World:
    """A hold ends by a death. Only what had begun, as far as the store knows, is a loss."""
    if world.row == "held" and mistake != "count what had not begun":
        return _waits(world, tried=mistake != "give back without the mark")
    if not world.bodies and world.row == "held":
        return replace(world, broken="what had not begun counts as a loss")
    losses = world.losses + 1
    if (on_lost == "dead" and mistake != "run again") or losses > MAX_LOSSES:
        return replace(world, row="dead", holder=None)
    return replace(_waits(world, tried=True), losses=losses, uncounted=0)


def _waits(world: World, *, tried: bool) -> World:
    """The row is owed again, and its message is published."""
    workers = tuple(worker.outdated() for worker in world.workers)
    return replace(world, row="waits", holder=None, tried=tried, messages=world.messages + 1, workers=workers)


def _stands(world: World, number: int, hold: int) -> bool:
    return world.is_held_by(number) and hold == CURRENT


def _with(world: World, number: int, worker: Worker) -> World:
    workers = (*world.workers[:number], worker, *world.workers[number + 1 :])
    return replace(world, workers=workers)


def wrong(world: World) -> str | None:
    """Say what must not be, where nothing more can happen or something was broken on the way."""
    if world.broken:
        return world.broken
    if world.row not in ("gone", "dead"):
        return "it is lost"
    if world.done > 1:
        return "it has counted twice"
    return "it is in the dead set, and has succeeded" if world.done and world.row == "dead" else None

"""Every interleaving of two workers that claim the runs of one job in pages, give them back, and end them in pages.

What `holds.py` has of the rows of durable tasks is true of jobs as well. A job differs in this: a hold is named by the
number of its run and by its worker, and a run that is undone keeps its number. While a run is in progress, or only
held, its job may be asked again, or be terminated. A page ends a run only if neither has happened. Each of `MISTAKES`
is a simpler rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.protocol_model.walk import replace

MISTAKES = (
    "undo twice", "undo what a process has", "end what was asked", "end what was terminated",
    "forget an end without an answer", "claim in a page after a death", "count what had not begun",
)  # fmt: skip


class Hold(NamedTuple):
    """A claimed run. The statements know its number and its worker; `serial` is what only the model knows."""

    run_no: int
    worker: int
    serial: int


class Worker(NamedTuple):
    """A worker with one process. `name` is new each time that it registers."""

    name: int
    alive: bool = True
    declared: bool = False
    """Its death is in the store, for good. It may live all the same."""
    fetched: int = 0
    """The run that is announced by the message that it has fetched."""
    sent: Hold | None = None
    """The run that its statement has claimed; the answer is on its way."""
    page: Hold | None = None
    """The run that waits here for the process."""
    process: tuple[str, Hold] | None = None
    """Handed (the body has not begun), runs, over (the body is over, and its end is not in the store)."""
    undoes: tuple[Hold, ...] = ()
    """The runs that are to be given back."""

    def holds(self) -> list[Hold]:
        """The holds that it remembers."""
        return [hold for hold in (self.sent, self.page, self.process and self.process[1], *self.undoes) if hold]


@dataclass(frozen=True)
class World:
    """What the store and the broker have, and where everybody stands."""

    status: str = "queued"
    run_no: int = 0
    hold: Hold | None = None
    """The run in progress."""
    in_page: bool = False
    asked: bool = False
    """It was asked since the claim of its run."""
    tried: bool = False
    """It has come back from a death: its next run is claimed by its process."""
    messages: tuple[int, ...] = (1,)
    """In the broker: the run that each announces."""
    workers: tuple[Worker, ...] = (Worker(10), Worker(20))
    asks: int = 1
    terminations: int = 1
    troubles: int = 2
    """How many may yet happen: a copy, a death, a freeze, a lost answer, a broken connection, a message given back."""
    # What was promised; no rule looks at these.
    owed: bool = True
    """It was asked, and no body has begun since."""
    has_begun: bool = False
    may_begin: int = 1
    """How many more bodies may begin: one for each ask and for each death."""
    uncounted: int = 0
    """Deaths in a body since the last one that was counted."""
    terminated: bool = False
    broken: str | None = None


def steps(world: World, mistake: str | None, on_lost: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.broken:
        return
    yield from _clients(world)
    if world.status in ("completed", "terminated") and not world.asks + world.terminations:
        return
    waits = world.hold is None and world.status in ("queued", "terminating")
    if waits and not world.messages and not any(worker.alive and worker.fetched for worker in world.workers):
        yield _ring(world)  # it was missing
    if world.troubles and world.messages:
        yield _trouble(world, messages=(*world.messages, world.messages[0]))  # a copy
    for number, worker in enumerate(world.workers):
        if worker.declared:
            if world.hold is not None and world.hold.worker == worker.name:
                yield _rescued(world, mistake)
            else:  # it begins anew, under another name
                again = worker._replace(name=worker.name + 1, declared=False)
                yield _with(world, number, again if worker.alive else Worker(worker.name + 1))
        if worker.alive:
            yield from _claims(world, number, mistake)
            yield from _gives_back(world, number, mistake)
            yield from _process(world, number, mistake)
            yield from _disasters(world, number)


def _clients(world: World) -> Iterator[World]:
    if world.asks:
        yield replace(world, asks=0)  # nobody does
    if world.terminations:
        yield replace(world, terminations=0)
    if world.asks and (world.hold is not None or world.status == "completed"):
        less = replace(world, asks=0, owed=True, may_begin=world.may_begin + 1)
        if world.status == "completed":
            yield _ring(replace(less, status="queued"))
        else:
            yield replace(less, asked=True)
    if world.terminations and world.status in ("queued", "running", "completed"):
        asked = replace(world, terminations=0, asks=0, status="terminating", terminated=True, owed=False)
        yield asked if world.hold is not None else _ring(asked)


def _claims(world: World, number: int, mistake: str | None) -> Iterator[World]:
    """The main process fetches a message and claims its run; what the page leaves out is claimed by the process."""
    worker = world.workers[number]
    if not worker.fetched and worker.sent is None and worker.page is None and world.messages:
        for run_no in set(world.messages):
            left = [*world.messages]
            left.remove(run_no)
            yield _with(replace(world, messages=tuple(left)), number, worker._replace(fetched=run_no))
    if worker.fetched:
        done = worker._replace(fetched=0)
        is_owed = worker.fetched == world.run_no + 1 and world.hold is None and not worker.declared
        if is_owed and world.status == "queued" and (not world.tried or mistake == "claim in a page after a death"):
            claimed, hold = _claimed(world, worker, in_page=True)
            yield _with(claimed, number, done._replace(sent=hold))
        elif not is_owed or world.status not in ("queued", "terminating"):
            yield _with(world, number, done)
        elif worker.process is None and world.status == "terminating":
            yield _with(replace(world, status="terminated", run_no=world.run_no + 1), number, done)  # its shutdown
        elif worker.process is None:
            claimed, hold = _claimed(world, worker, in_page=False)
            yield _with(claimed, number, done._replace(process=("handed", hold)))
    if worker.sent is not None:
        yield _with(world, number, worker._replace(sent=None, page=worker.sent))
        if world.troubles:  # the answer is lost, and the process finds nothing to claim
            yield _with(_trouble(world), number, worker._replace(sent=None))
    if worker.page is not None and worker.process is None:
        yield _with(world, number, worker._replace(page=None, process=("handed", worker.page)))


def _claimed(world: World, worker: Worker, *, in_page: bool) -> tuple[World, Hold]:
    known = {hold.serial for worker in world.workers for hold in worker.holds()}
    hold = Hold(world.run_no + 1, worker.name, min({*range(len(known) + 1)} - known))
    return replace(world, status="running", run_no=hold.run_no, hold=hold, in_page=in_page, asked=False), hold


def _gives_back(world: World, number: int, mistake: str | None) -> Iterator[World]:
    """A message goes back to its queue, because the worker is busy or its connection breaks; then its run is undone."""
    worker = world.workers[number]
    if worker.page is not None and world.troubles:
        twice = 2 if mistake == "undo twice" else 1
        back = _trouble(world, messages=(*world.messages, worker.page.run_no))
        yield _with(back, number, worker._replace(page=None, undoes=worker.undoes + (worker.page,) * twice))
    if mistake == "undo what a process has" and worker.process is not None and world.troubles:
        state, hold = worker.process
        if state == "handed":
            back = _trouble(world, messages=(*world.messages, hold.run_no))
            yield _with(back, number, worker._replace(undoes=(*worker.undoes, hold)))
    if worker.undoes:
        hold, *left = worker.undoes
        done = _with(world, number, worker._replace(undoes=tuple(left)))
        yield _undone(done, hold) if _stands(world, hold) else done
    elif world.hold is not None and world.hold.worker == worker.name and not worker.holds() and not worker.declared:
        yield _rescued(world, mistake)  # it is held and not run


def _undone(world: World, hold: Hold) -> World:
    if hold != world.hold:
        world = replace(world, broken="another hold of the same name is undone")
    status = "terminating" if world.status == "terminating" else "queued"
    return _ring(replace(world, status=status, run_no=world.run_no - 1, hold=None))


def _process(world: World, number: int, mistake: str | None) -> Iterator[World]:
    """The process begins, ends and dies, and the main process writes its end."""
    worker = world.workers[number]
    if worker.process is None:
        return
    state, hold = worker.process
    idle = _with(world, number, worker._replace(process=None))
    if state == "handed":
        broken = None if world.may_begin else "its body ran more often than it may"
        owed = world.owed and not _stands(world, hold)
        begun = replace(world, has_begun=True, may_begin=world.may_begin - 1, broken=broken, owed=owed)
        yield _with(begun, number, worker._replace(process=("runs", hold)))
    elif state == "runs":
        yield _with(world, number, worker._replace(process=("over", hold)))
        if world.troubles:
            died = _trouble(idle, may_begin=world.may_begin + 1)
            yield _requeued(replace(died, uncounted=0)) if _stands(world, hold) else died
    else:
        ended = _ended(idle, hold, mistake)
        yield ended
        if world.troubles:  # it was written or not, and will be written again
            yield _trouble(idle if mistake == "forget an end without an answer" else world)
            yield _trouble(ended, workers=world.workers)


def _ended(world: World, hold: Hold, mistake: str | None) -> World:
    if not _stands(world, hold):
        return world
    if hold != world.hold:
        return replace(world, broken="what another run holds is ended")
    done = replace(world, hold=None, asked=False, tried=False, uncounted=0)
    if world.status == "terminating" and mistake != "end what was terminated":
        return _ring(done)
    if world.asked and mistake != "end what was asked":
        return _ring(replace(done, status="queued"))
    return replace(done, status="completed")


def _disasters(world: World, number: int) -> Iterator[World]:
    """The worker dies as a whole, or is declared dead while it is frozen."""
    worker = world.workers[number]
    if not world.troubles:
        return
    happened = _trouble(world, may_begin=world.may_begin + 1)
    if not worker.declared:
        yield _with(happened, number, worker._replace(declared=True))
    if worker.process is not None and worker.process[0] == "runs" and _stands(world, worker.process[1]):
        uncounted = world.uncounted + world.in_page
        broken = "deaths in the body are never counted" if uncounted > 1 else None
        happened = replace(happened, uncounted=uncounted, broken=broken)
    yield _with(happened, number, Worker(worker.name, alive=False, declared=True))


def _rescued(world: World, mistake: str | None) -> World:
    """A run is taken from its worker. One that was claimed in a page is no loss: nobody knows whether it had begun."""
    if not world.in_page:
        return _requeued(replace(world, uncounted=0))
    if mistake == "count what had not begun" and not world.has_begun:
        return replace(world, broken="what had not begun counts as a loss")
    return _requeued(world)


def _requeued(world: World) -> World:
    status = "terminating" if world.status == "terminating" else "queued"
    return _ring(replace(world, status=status, hold=None, tried=True))


def _ring(world: World) -> World:
    return replace(world, messages=(*world.messages, world.run_no + 1))


def _stands(world: World, hold: Hold) -> bool:
    """Tell whether this is the run in progress, as its name says."""
    return world.hold is not None and world.hold[:2] == hold[:2]


def _trouble(world: World, **changes: object) -> World:
    return replace(world, troubles=world.troubles - 1, **changes)


def _with(world: World, number: int, worker: Worker) -> World:
    return replace(world, workers=(*world.workers[:number], worker, *world.workers[number + 1 :]))


def wrong(world: World) -> str | None:
    """Say what must not be, where nothing more can happen or something was broken on the way."""
    if world.broken:
        return world.broken
    if world.status not in ("completed", "terminated"):
        return "it is lost"
    if world.terminated != (world.status == "terminated"):
        return "its termination is forgotten"
    return "an ask is forgotten" if world.owed else None

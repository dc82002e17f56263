"""Every interleaving of doorbells, claims, ends, pauses and losses in a managed queue.

A doorbell of a managed queue is a permit: the claim takes the best job that waits, whichever job the doorbell names. A
row that waits is published (a doorbell was sent for it), or marked (it waits until somebody rings), or due (a retry
that the sweeper is about to publish). One rule holds all together: **a permit that is used up takes one row out of the
published ones.** It claims a published row; or it marks one, if the gate is closed, or if others have locked all jobs
that wait; or one takes the place of the row that it claims, if that was marked or due.

A claim locks the row of the queue, and looks at the gate and at the jobs in a later statement of the same transaction.
The lock excludes other claims if the queue has a limit; without a limit it excludes only pauses and rings. Lock and
look are one step here: whatever happens between them may as well happen before the lock. A ring takes the lock, too,
before it looks for marked rows. After the commit of an end its process publishes the next run of the same job, or rings
for one marked row. A process that dies with a doorbell in its hands has lost it, as the broker may.

The sweeper repairs everything, but late. So two things are judged that need no sweeper as long as nothing is lost and
nobody dies: for each published row a doorbell is out, and for each free slot that a waiting row could have a doorbell
is out, or somebody is about to ring. Each loss and each death excuses one of them (`excused`).

Each of `MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.protocol_model.walk import ENDLESS, replace

USED_UP = "a row is published, and its doorbell is used up"
NOBODY_RINGS = "a slot is free, a row waits, and nobody rings"
BEYOND = "a run begins beyond the gate"
PAUSED = "a run begins after a pause"
WORSE = "a run begins before a better one"
TWICE = "a run begins twice"
WAITS = "a job waits for ever"

MISTAKES = {
    "an end rings nobody": NOBODY_RINGS,
    "an end rings before its commit": NOBODY_RINGS,
    "an end of a run from before the limit rings nobody": NOBODY_RINGS,
    "a resume rings nobody": NOBODY_RINGS,
    "another limit rings nobody": NOBODY_RINGS,
    "a ring looks without the lock": NOBODY_RINGS,
    "a new row is marked at a gate that was closed": NOBODY_RINGS,
    "the sweeper rings nobody": WAITS,
    "a published row is not looked for": WAITS,
    "a marked row is looked for": ENDLESS,
    "a queue that is managed no more keeps its marks": WAITS,
    "the gate is read before the lock": BEYOND,
    "a rescue and an end both count down": BEYOND,
    "an unmanaged claim ignores the gate": BEYOND,
    "a claim without a limit takes no lock": PAUSED,
    "a permit claims the job that it names": WORSE,
    "a row is chosen before the lock": TWICE,
    "a stale permit is dropped": USED_UP,
    "a refused permit marks nothing": USED_UP,
    "a refused permit marks its own row or nothing": USED_UP,
    "a refused permit does not skip a locked row": USED_UP,
    "a claim of a marked row marks nothing": USED_UP,
    "a claim of a retry that is due marks nothing": USED_UP,
    "a refused permit marks a retry that is due": USED_UP,
}
"""What each leads to."""

MARKS_NOTHING = {
    "marked": "a claim of a marked row marks nothing",
    "due": "a claim of a retry that is due marks nothing",
}

JOBS = (0, 1, 2)
BEST_LAST = (2, 0, 1)
"""The order in which the last job is the best."""
NOBODY = -1

UNMANAGED = 0
UNLIMITED = 9
"""The limit of a managed queue that has none."""

Claim = tuple[str, int, int]
"""What a process does with a doorbell: the step, the job that the doorbell names, and the job that it takes or marks.

Steps: idle; takes or marks (it has locked the queue's row, looked, and locked the job or the message); names (it takes
the job by its name, without the queue's row). By mistakes: counted, chose, loose.
"""
IDLE: Claim = ("idle", NOBODY, NOBODY)
LOCKING = ("takes", "marks")
TAKING = ("takes", "names", "loose")
HOLDING = (*TAKING, "marks")


@dataclass(frozen=True)
class World:
    """What is committed, what is in the broker, and how far each transaction has come."""

    limit: int = NOBODY
    paused: str = ""
    """For a while, or for ever."""
    rows: tuple[str, ...] = ("published", "published", "absent")
    """Of each job: absent (nobody has asked it), published, marked, running, later and due (a retry), done."""
    bells: tuple[int, ...] = (1, 1, 0)
    """How many doorbells of each job are in the broker."""
    claims: tuple[Claim, ...] = (IDLE, IDLE)
    order: tuple[int, ...] = JOBS
    """The jobs, the best first."""
    rings: int = 0
    """How many processes have committed an end, and will ring for one row."""
    openers: int = 0
    """How many have opened the gate, and will ring for as many rows as there are free slots."""
    locked: bool = False
    """Whether a client has locked the last job, to give it the highest priority."""
    asked: bool = False
    """Whether the first job was asked again during its run."""
    early: int = NOBODY
    """The run whose end has rung, and is not committed; only a mistake has it."""
    miscounted: int = 0
    """By how much a counter would differ from the number of runs; only a mistake has it."""
    old: frozenset[int] = frozenset()
    """Runs from before the limit; only a mistake looks at them."""
    pauses: int = 0
    next_limit: int = NOBODY
    priorities: int = 0
    asks: int = 0
    retries: int = 0
    """How many runs may still end with a retry."""
    faults: int = 1
    """How many losses, copies and deaths may still come."""
    exact: bool = True
    """A ghost: False once the queue is managed no more. Doorbells that claim by name do not stand for each other."""
    excused: int = 0
    """A ghost: how many doorbells and rings may be missing."""
    fault: str = ""
    """What must never be."""


SCENES: tuple[dict[str, Any], ...] = (
    {"limit": 1, "pauses": 1, "order": BEST_LAST},
    {"limit": 1, "asks": 1, "order": BEST_LAST},
    {"limit": 1, "priorities": 1},
    {"limit": 1, "next_limit": 2, "order": BEST_LAST},
    {"limit": 2, "next_limit": 1, "order": BEST_LAST},
    {"limit": 2, "pauses": 1, "order": BEST_LAST},
    {"limit": UNLIMITED, "pauses": 1, "order": BEST_LAST},
    {"limit": UNLIMITED, "pauses": 1, "priorities": 1, "faults": 0},
    {"limit": 1, "next_limit": UNMANAGED, "pauses": 1, "order": BEST_LAST},
    {"limit": UNMANAGED, "next_limit": 1, "pauses": 1, "rows": ("published", "published", "done")},
    {"limit": 1, "faults": 2},
    {"limit": 1, "retries": 1, "order": BEST_LAST},
    {"limit": 2, "retries": 1, "faults": 0, "order": BEST_LAST},
    {"limit": UNLIMITED, "retries": 1, "faults": 0, "order": BEST_LAST},
)


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.limit == NOBODY:
        yield from (replace(world, **scene) for scene in SCENES)
    elif not world.fault:
        for part in (_claims, _runs, _rings, _clients, _broker, _sweeper):
            yield from map(_judged, part(world, mistake))


def _judged(world: World) -> World:
    if world.fault or world.limit == UNMANAGED or not world.exact:
        return world
    published, waiting, taken, permits = _counted(world.rows, world.claims)
    permits += sum(world.bells)
    if published > permits + world.excused:
        return replace(world, fault=USED_UP)
    free = 0 if world.openers else max(_free(world) - taken, 0)
    if min(free, waiting) > permits + world.rings + world.excused:
        return replace(world, fault=NOBODY_RINGS)
    return world


@cache
def _counted(rows: tuple[str, ...], claims: tuple[Claim, ...]) -> tuple[int, int, int, int]:
    """Return how many rows are published, and how many wait; how many claims take a row, and how many are permits.

    There are a million worlds to judge, and few that differ in this.
    """
    held = _held(claims, HOLDING)
    free = [row for job, row in enumerate(rows) if job not in held]
    taken = sum(claim[0] == "takes" for claim in claims)
    permits = sum(_is_permit(rows, claim) for claim in claims)
    return free.count("published"), free.count("published") + free.count("marked"), taken, permits


def _is_permit(rows: tuple[str, ...], claim: Claim) -> bool:
    """Whether the doorbell that the process holds has yet to claim or mark a row."""
    step, _, row = claim
    return step in ("counted", "chose") or (step in ("takes", "loose") and rows[row] != "published")


def _excused(world: World, more: int = 1) -> int:
    return min(world.excused + more, len(JOBS))


def _waits(row: str) -> bool:
    return row in ("published", "marked", "due")


def _free(world: World, miscounted: int = 0) -> int:
    """Return how many slots are free, as a statement finds that begins now: none if the gate is closed."""
    if world.limit == UNMANAGED or world.paused:
        return 0
    return max(world.limit - world.rows.count("running") - miscounted, 0)


def _is_unlocked(world: World) -> bool:
    """Whether nobody has locked the queue's row."""
    return not _held(world.claims, LOCKING)


def _with(several: tuple[Any, ...], place: int, one: Any) -> tuple[Any, ...]:
    return (*several[:place], one, *several[place + 1 :])


def _changed(world: World, place: int, claim: Claim, **changes: Any) -> World:
    """Return the world in which a process has come to another step. Processes that have changed places are the same."""
    return replace(world, claims=tuple(sorted(_with(world.claims, place, claim))), **changes)


def _claims(world: World, mistake: str | None) -> Iterator[World]:
    for place, claim in enumerate(world.claims):
        if claim in world.claims[:place]:
            continue
        step, bell, row = claim
        match step:
            case "idle":
                for job in JOBS:
                    if world.bells[job]:
                        fewer = replace(world, bells=_less(world, job))
                        if world.limit == UNMANAGED or mistake == "an unmanaged claim ignores the gate":
                            yield from _by_name(fewer, place, job)
                        if world.limit != UNMANAGED:
                            yield from _got(fewer, place, job, mistake)
            case "counted" if _may_lock(world):
                yield from _looked(world, place, bell, mistake, is_open=row > 0)
            case "chose" if _may_lock(world) and not _free(world):
                yield from _looked(world, place, bell, mistake, is_open=False)
            case "chose" if _may_lock(world) and row not in _held(world.claims, HOLDING):
                yield _changed(world, place, ("takes", bell, row))
            case "takes" | "names" | "loose" if row not in _held(world.claims, ("marks",)):
                yield from _begun(world, place, mistake)
            case "marks":
                rows = world.rows if row == NOBODY else _with(world.rows, row, "marked")
                yield _changed(world, place, IDLE, rows=rows)
        if world.faults and step in HOLDING:  # the process dies, and its transaction is rolled back
            yield _changed(world, place, IDLE, faults=world.faults - 1, excused=_excused(world))


def _less(world: World, job: int) -> tuple[int, ...]:
    return _with(world.bells, job, world.bells[job] - 1)


@cache
def _held(claims: tuple[Claim, ...], how: tuple[str, ...]) -> frozenset[int]:
    """Return the jobs that claims in these steps have locked, or their messages."""
    return frozenset(row for step, _, row in claims if step in how)


def _may_lock(world: World) -> bool:
    return world.limit == UNLIMITED or _is_unlocked(world)


def _by_name(world: World, place: int, bell: int) -> Iterator[World]:
    """A claim by name waits for whoever has locked its job; it never waits for the queue."""
    if bell in _takeable(world):
        fault = BEYOND if world.limit != UNMANAGED and not _free(world) else ""
        yield _changed(world, place, ("names", NOBODY, bell), fault=fault)
    elif not _waits(world.rows[bell]):
        yield _changed(world, place, IDLE)


def _takeable(world: World) -> list[int]:
    """Return the waiting jobs that nobody has locked, the best first."""
    return _waiting(world.rows, world.order, _held(world.claims, TAKING), world.locked)


@cache
def _waiting(rows: tuple[str, ...], order: tuple[int, ...], held: frozenset[int], locked: bool) -> list[int]:
    taken = held | {JOBS[-1]} if locked else held
    return [job for job in order if _waits(rows[job]) and job not in taken]


def _got(world: World, place: int, bell: int, mistake: str | None) -> Iterator[World]:
    best = _takeable(world)
    if mistake == "the gate is read before the lock":
        yield _changed(world, place, ("counted", bell, _free(world)))
    elif mistake == "a row is chosen before the lock" and best and _free(world):
        yield _changed(world, place, ("chose", bell, best[0]))
    elif mistake == "a claim without a limit takes no lock" and world.limit == UNLIMITED and best and _free(world):
        yield _changed(world, place, ("loose", bell, best[0]))
    elif _may_lock(world):
        yield from _looked(world, place, bell, mistake, is_open=_free(world, world.miscounted) > 0)


def _looked(world: World, place: int, bell: int, mistake: str | None, *, is_open: bool) -> Iterator[World]:
    """The statement behind the lock takes the best job if the gate is open, or marks a row."""
    found = _takeable(world)
    if mistake == "a stale permit is dropped" and not _waits(world.rows[bell]):
        yield _changed(world, place, IDLE)
    elif is_open and found:
        best = bell if mistake == "a permit claims the job that it names" and bell in found else found[0]
        fault = "" if _free(world) else BEYOND
        fault = fault or ("" if best == found[0] else WORSE)
        names = NOBODY if world.rows[best] == "published" else bell
        yield _changed(world, place, ("takes", names, best), fault=fault)
    else:
        # Only a job that a client has locked may wait here. The sweeper rings for it.
        missed = is_open and world.locked and _waits(world.rows[JOBS[-1]])
        for job in _to_mark(world, bell, mistake):
            yield _changed(world, place, ("marks", NOBODY, job), excused=_excused(world, missed))


def _to_mark(world: World, bell: int, mistake: str | None) -> list[int]:
    """Return which rows a permit may mark that claims no published one: that of its job, or any that is published."""
    if mistake == "a refused permit marks nothing":
        return [NOBODY]
    locked = _held(world.claims, TAKING if mistake == "a refused permit does not skip a locked row" else HOLDING)
    found = [job for job in world.order if world.rows[job] == "published" and job not in locked]
    if bell in found or (mistake == "a refused permit marks a retry that is due" and world.rows[bell] == "due"):
        return [bell]
    if mistake == "a refused permit marks its own row or nothing" and world.rows[bell] == "marked":
        return [NOBODY]
    return found or [NOBODY]


def _begun(world: World, place: int, mistake: str | None) -> Iterator[World]:
    """The claim is committed."""
    step, bell, row = world.claims[place]
    if not _waits(world.rows[row]):
        yield replace(world, fault=TWICE)
    elif world.paused and step != "names":
        yield replace(world, fault=PAUSED)
    else:
        old = world.old | {row} if world.limit == UNMANAGED else world.old - {row}
        begun = _changed(world, place, IDLE, rows=_with(world.rows, row, "running"), old=old)
        if world.rows[row] == "published" or mistake == MARKS_NOTHING.get(world.rows[row]):
            yield begun
        else:
            for job in _to_mark(begun, bell, None):
                yield begun if job == NOBODY else replace(begun, rows=_with(begun.rows, job, world.rows[row]))


def _runs(world: World, mistake: str | None) -> Iterator[World]:
    for job in JOBS:
        if world.rows[job] != "running":
            continue
        if mistake == "an end rings before its commit" and world.early != job and world.limit in (1, 2):
            if world.early == NOBODY and _is_unlocked(world):
                ended = replace(world, rows=_with(world.rows, job, "done"))
                rung = _rung(ended, 1)
                yield replace(rung, rows=_with(rung.rows, job, "running"), early=job)
        else:
            ended = _ended(world, job, mistake)
            yield ended
            if world.retries and ended.rows[job] == "done":
                yield replace(ended, rows=_with(ended.rows, job, "later"), retries=world.retries - 1)
        if world.faults:
            miscounted = world.miscounted - (mistake == "a rescue and an end both count down")
            rescued = replace(_asked(world, job), faults=world.faults - 1, miscounted=miscounted)
            yield replace(rescued, asked=world.asked and job != 0)
    if world.asks and world.rows[0] == "running":
        yield replace(world, asks=world.asks - 1, asked=True)


def _ended(world: World, job: int, mistake: str | None) -> World:
    """The end is committed. It rings, unless the doorbell of the job's own next run does."""
    if job == 0 and world.asked:
        return replace(_asked(world, job), asked=False)
    early = NOBODY if world.early == job else world.early
    rings = world.limit in (1, 2) and world.early != job and mistake != "an end rings nobody"
    if mistake == "an end of a run from before the limit rings nobody" and job in world.old:
        rings = False
    return replace(world, rows=_with(world.rows, job, "done"), rings=world.rings + rings, early=early)


def _asked(world: World, job: int) -> World:
    """The job waits, and its doorbell is sent. A process that dies in between has lost the doorbell."""
    bells = _with(world.bells, job, world.bells[job] + 1)
    return replace(world, rows=_with(world.rows, job, "published"), bells=bells)


def _rings(world: World, mistake: str | None) -> Iterator[World]:
    if world.rings:
        if _is_unlocked(world) or mistake == "a ring looks without the lock":
            yield replace(_rung(world, 1), rings=world.rings - 1)
        if world.faults:
            yield replace(world, rings=world.rings - 1, faults=world.faults - 1, excused=_excused(world))
    if world.openers:
        if _is_unlocked(world):
            yield replace(_rung(world, len(JOBS)), openers=world.openers - 1)
        if world.faults:
            yield replace(world, openers=world.openers - 1, faults=world.faults - 1, excused=len(JOBS))


def _rung(world: World, most: int) -> World:
    """Publish the best of the marked rows, as many as there are free slots."""
    marked = [job for job in world.order if world.rows[job] == "marked"]
    for job in marked[: min(most, _free(world))]:
        world = _asked(world, job)
    return world


def _clients(world: World, mistake: str | None) -> Iterator[World]:
    match world.rows[2]:
        case "absent" if mistake == "a new row is marked at a gate that was closed" and not _free(world):
            yield replace(world, rows=_with(world.rows, 2, "coming"))
        case "absent":
            yield _asked(world, 2)
        case "coming":
            yield replace(world, rows=_with(world.rows, 2, "marked"))
    if world.pauses and world.limit != UNMANAGED and _is_unlocked(world):
        for how in ("for a while", "for ever"):
            yield replace(world, paused=how, pauses=world.pauses - 1)
    if world.paused == "for a while" and _is_unlocked(world):
        yield replace(world, paused="", openers=world.openers + (mistake != "a resume rings nobody"))
    if world.next_limit != NOBODY and _is_unlocked(world):
        yield _limited(world, mistake)
    if world.locked:
        yield replace(world, locked=False, order=BEST_LAST)
    elif world.priorities and JOBS[-1] in _takeable(world):
        yield replace(world, locked=True, priorities=world.priorities - 1)


def _limited(world: World, mistake: str | None) -> World:
    changed = replace(world, limit=world.next_limit, next_limit=NOBODY)
    if world.next_limit == UNMANAGED:
        changed = replace(changed, exact=False)
        if mistake != "a queue that is managed no more keeps its marks":
            for job in JOBS:
                changed = _asked(changed, job) if world.rows[job] == "marked" else changed
        return changed
    opens = world.limit != UNMANAGED and mistake != "another limit rings nobody"
    return replace(changed, openers=world.openers + opens)


def _broker(world: World, _: str | None) -> Iterator[World]:
    for job in JOBS:
        if world.faults and world.bells[job]:
            fewer = replace(world, faults=world.faults - 1)
            yield replace(fewer, bells=_less(world, job), excused=_excused(world))
            yield replace(fewer, bells=_with(world.bells, job, world.bells[job] + 1))


def _sweeper(world: World, mistake: str | None) -> Iterator[World]:
    """Look for the doorbell of each published row, and ring for marked ones if slots are free."""
    held = _held(world.claims, HOLDING)
    looked_for = ["published"] if mistake != "a published row is not looked for" else []
    looked_for += ["marked"] if mistake == "a marked row is looked for" else []
    for job in JOBS:
        if world.rows[job] in looked_for and not world.bells[job] and job not in held:
            yield _asked(world, job)
        if world.rows[job] == "later":
            yield replace(world, rows=_with(world.rows, job, "due"))
        if world.rows[job] == "due" and job not in held:
            yield _asked(world, job)
    if _is_unlocked(world) and mistake != "the sweeper rings nobody":
        rung = _rung(world, len(JOBS))
        if rung != world:
            yield rung


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen; in a paused queue rows may wait."""
    if world.fault:
        return world.fault
    may_wait = world.paused and world.limit != UNMANAGED
    return WAITS if any(map(_waits, world.rows)) and not may_wait else None

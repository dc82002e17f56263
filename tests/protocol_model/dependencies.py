"""Every interleaving of a job that is made to depend on two others, of their ends, and of who looks at it then.

Transactions are taken apart into their statements: each sees what is committed when it begins, a lock is held until the
end, and a process may die in between. Rules are those of `store/dependencies.py` and
`operations/changes/dependencies.py`; each of `MISTAKES` is what one is tempted to do instead.

Nobody who ends a dependency locks the job that depends on it, and nobody who makes a job depend on others locks those.
An end marks its own edges as over, and that mark is the note that the job is to be looked at. It does so for edges that
it can see; whether it has any, its own row tells (`flag`). An edge that is new is a note as well: whoever looks
confirms it under the lock of the dependency, which has then ended, or gets the flag. Only a look takes edges away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from tests.protocol_model.walk import replace

W = TypeVar("W")

MISTAKES = (
    "looking locks no dependency", "looking sets no flag", "looking releases in any case",
    "looking takes away more than it has seen", "adding confirms its edge", "adding does not lock the job",
    "an end takes its edge away", "an end marks after its commit", "an end reads its flag before its lock",
    "undepend takes the edge away", "a deletion takes its edge away",
)  # fmt: skip
SEEN = ("new", "kept", "going", "over")
"""Edges that are committed; `going`: a transaction that is open marks it as over."""


@dataclass(frozen=True)
class World:
    """What is committed, and how far each transaction has come. Pairs are those of the two dependencies."""

    is_open: tuple[bool, bool] = (True, True)
    flag: tuple[bool, bool] = (False, False)
    lock: tuple[str, str] = ("", "")
    """Who has locked each dependency: end, look or deletion."""
    edge: tuple[str, str] = ("", "")
    """adding, new, kept (confirmed), going, over; empty without one."""
    end: tuple[str, str] = ("", "")
    """What ends each dependency: locked, sees (marks its edge), sees nothing; late, where it marks afterwards."""
    blocked: bool = False
    begun: str = ""
    job_lock: str = ""
    """Who has locked the job: add (with a number), look or undepend."""
    add: tuple[str, str] = ("", "")
    """Who makes the job depend on each: locked, added, over."""
    look: str = ""
    """Who looks at it: found (new edges), locking, locked; then `frees` or `keeps`."""
    found: tuple[int, ...] = ()
    """The new edges that were seen before the locks."""
    confirms: tuple[int, ...] = ()
    """Those whose dependencies get the flag at the commit."""
    takes: tuple[int, ...] = ()
    """The edges that the look takes away at the commit."""
    undepend: str = ""
    """Who takes the first edge away, or not: locked, over."""
    deaths: int = 1


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.begun:
        return
    for which in (0, 1):
        yield from _add(world, which, mistake)
        yield from _end(world, which, mistake)
    yield from _delete(world, mistake)
    yield from _look(world, mistake)
    yield from _undepend(world, mistake)
    if not world.blocked and not world.job_lock:
        waits = any(edge and is_open for edge, is_open in zip(world.edge, world.is_open, strict=True))
        yield replace(world, begun="early" if waits else "in time")


def put(pair: tuple[W, ...], which: int, value: W) -> tuple[W, ...]:
    """Return a pair with another value at one place."""
    return (*pair[:which], value, *pair[which + 1 :])


def _add(world: World, which: int, mistake: str | None) -> Iterator[World]:
    mine, locks = world.add[which], mistake != "adding does not lock the job"
    if mine == "" and not (locks and world.job_lock):
        job_lock = f"add {which}" if locks else world.job_lock
        yield replace(world, add=put(world.add, which, "locked"), job_lock=job_lock)
    elif mine == "locked":
        is_open = world.is_open[which]
        yield replace(
            world, add=put(world.add, which, "added" if is_open else "over"),
            edge=put(world.edge, which, "adding" if is_open else ""),
            job_lock=world.job_lock if is_open else _free(world, f"add {which}"),
        )  # fmt: skip
    elif mine == "added":
        edge = "kept" if mistake == "adding confirms its edge" else "new"
        yield replace(
            world, add=put(world.add, which, "over"), edge=put(world.edge, which, edge), blocked=True,
            job_lock=_free(world, f"add {which}"),
        )  # fmt: skip
        if world.deaths:
            yield replace(
                world, add=put(world.add, which, "over"), edge=put(world.edge, which, ""),
                job_lock=_free(world, f"add {which}"), deaths=world.deaths - 1,
            )  # fmt: skip


def _end(world: World, which: int, mistake: str | None) -> Iterator[World]:
    """A dependency ends: with its flag its transaction marks the edges that it can see as over."""
    mine, early = world.end[which], mistake == "an end reads its flag before its lock"
    if mine == "" and world.is_open[which] and early:
        yield replace(world, end=put(world.end, which, "flagged" if world.flag[which] else "plain"))
    elif mine in ("", "flagged", "plain") and world.is_open[which] and not world.lock[which] and (mine or not early):
        yield replace(world, end=put(world.end, which, f"locked {mine}".strip()), lock=put(world.lock, which, "end"))
    elif mine.startswith("locked"):
        has_flag = mine == "locked flagged" if early else world.flag[which]
        marks = has_flag and world.edge[which] in ("new", "kept")
        edge = put(world.edge, which, "going") if marks else world.edge
        yield replace(world, end=put(world.end, which, "sees" if marks else "sees nothing"), edge=edge)
    elif mine in ("sees", "sees nothing"):
        marks, late = mine == "sees", mistake == "an end marks after its commit"
        after = "" if mistake == "an end takes its edge away" else "kept" if late else "over"
        yield replace(
            world,
            end=put(world.end, which, "late" if marks and late else "over"),
            edge=put(world.edge, which, after) if marks else world.edge,
            is_open=put(world.is_open, which, False),
            lock=put(world.lock, which, ""),
        )
    elif mine == "late":
        edge = put(world.edge, which, "over") if world.edge[which] else world.edge
        yield replace(world, end=put(world.end, which, "over"), edge=edge)
        if world.deaths:
            yield replace(world, end=put(world.end, which, "over"), deaths=world.deaths - 1)
    if world.deaths and mine in ("locked", "sees", "sees nothing"):
        edge = put(world.edge, which, "kept") if mine == "sees" else world.edge
        yield replace(
            world, end=put(world.end, which, ""), edge=edge, lock=put(world.lock, which, ""), deaths=world.deaths - 1
        )


def _delete(world: World, mistake: str | None) -> Iterator[World]:
    """The first dependency is deleted, which marks the edges that it can see; a new one finds that it is gone."""
    if world.is_open[0] and not world.lock[0] and world.end[0] == "":
        yield replace(world, lock=put(world.lock, 0, "deletion"))
    elif world.lock[0] == "deletion":
        edge = world.edge[0]
        if edge in SEEN:
            edge = "" if mistake == "a deletion takes its edge away" else "over"
        yield replace(
            world, lock=put(world.lock, 0, ""), is_open=put(world.is_open, 0, False), edge=put(world.edge, 0, edge)
        )


def _look(world: World, mistake: str | None) -> Iterator[World]:
    """Look at the job: confirm its new edges, take away those that are over, and free it without any."""
    match world.look:
        case "" if "new" in world.edge or "over" in world.edge:
            yield replace(world, look="found", found=tuple(n for n in (0, 1) if world.edge[n] == "new"))
        case "found" if not world.job_lock:
            yield replace(world, look="locking", job_lock="look")
        case "locking":
            wanted = () if mistake == "looking locks no dependency" else world.found
            missing = [which for which in wanted if world.lock[which] != "look"]
            if not missing:
                yield replace(world, look="locked")
            elif not world.lock[missing[0]]:
                yield replace(world, lock=put(world.lock, missing[0], "look"))
        case "locked":  # an edge that has become new meanwhile is left to the next look
            new = tuple(which for which in world.found if world.edge[which] == "new")
            over = tuple(which for which in (0, 1) if world.edge[which] == "over")
            takes = (*over, *(which for which in new if not world.is_open[which]))
            flags = mistake != "looking sets no flag"
            left = any(world.edge[which] in SEEN for which in (0, 1) if which not in takes)
            frees = not left or mistake == "looking releases in any case"
            yield replace(
                world, look="frees" if frees else "keeps", takes=takes,
                found=tuple(which for which in new if which not in takes),
                confirms=tuple(which for which in new if which not in takes and flags),
            )  # fmt: skip
        case "frees" | "keeps":
            takes = world.takes
            if mistake == "looking takes away more than it has seen":
                takes = (*takes, *(which for which in (0, 1) if world.edge[which] == "over"))
            edge = tuple("" if n in takes else _confirmed(world, n) for n in (0, 1))
            flag = tuple(has or n in world.confirms for n, has in enumerate(world.flag))
            blocked = world.blocked and world.look == "keeps"
            yield _looked(replace(world, edge=edge, flag=flag, blocked=blocked))
    if world.deaths and world.look in ("locking", "locked", "frees", "keeps"):
        yield _looked(replace(world, deaths=world.deaths - 1))


def _confirmed(world: World, which: int) -> str:
    return "kept" if world.edge[which] == "new" and which in world.found else world.edge[which]


def _looked(world: World) -> World:
    lock = tuple("" if owner == "look" else owner for owner in world.lock)
    return replace(world, look="", found=(), confirms=(), takes=(), lock=lock, job_lock=_free(world, "look"))


def _undepend(world: World, mistake: str | None) -> Iterator[World]:
    """Mark the first edge as over; that waits for an end that is just marking it."""
    if world.undepend == "":
        yield replace(world, undepend="over")
    match world.undepend:
        case "" if world.blocked and not world.job_lock:
            yield replace(world, undepend="locked", job_lock="undepend")
        case "locked" if world.edge[0] != "going":
            mark = "" if mistake == "undepend takes the edge away" else "over"
            edge = put(world.edge, 0, mark) if world.edge[0] in SEEN else world.edge
            yield replace(world, undepend="over", edge=edge, job_lock=_free(world, "undepend"))


def _free(world: World, owner: str) -> str:
    return "" if world.job_lock == owner else world.job_lock


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen."""
    if world.begun == "early":
        return "the job begins while a job that it depends on is open"
    if not world.begun:
        return f"the job waits for ever: its edges are {world.edge}"
    return None

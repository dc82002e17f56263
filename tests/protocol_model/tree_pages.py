"""Every interleaving of pages that terminate a large tree, a child that comes meanwhile, and a forced run of the root.

The root R is terminating, and has the children a and b; a page has at most two jobs. Somebody makes g below b, somebody
holds a for a while, and somebody forces R to run, which then makes the child n. Transactions are taken apart into their
statements: each sees what is committed when it begins, and a process may die in between. Rules are those of
`store/trees.py` and `operations/changes/follow_up.py`; each of `MISTAKES` is what one is tempted to
do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

MISTAKES = (
    "a job that others have locked is passed over", "the children are those that were read before the lock",
    "a forced run leaves the place of its job", "a forced run does not wait for a page",
    "a page replaces the row of a place", "a new child is not judged under the lock",
    "a place is removed with the first page",
)  # fmt: skip

PAGE = 2
IDS = {"R": 1, "a": 2, "b": 3, "n": 4, "g": 5}
NAME = {"a": 1, "b": 2, "n": 3, "g": 1}
PARENT = {"a": "R", "b": "R", "n": "R", "g": "b"}

Place = tuple[str, bool, int]
"""(job, itself, after): the job with everything below it, or only its children with names after this."""
Found = tuple[str, str | None]
"""(job, parent): the parent is None where the page has begun at the job itself."""


@dataclass(frozen=True)
class World:
    """What is committed, and how far each transaction has come."""

    jobs: tuple[tuple[str, str], ...] = (("a", "live"), ("b", "live"))
    """Their statuses: live or terminated."""
    places: frozenset[Place] = frozenset({("R", False, 0)})
    forced: bool = False
    locks: tuple[tuple[str, str], ...] = ()
    """Who has locked a job: page, adder or holder."""
    page: str = "idle"
    """What it has done last: took (the places), found, locked, went on."""
    taken: tuple[Place, ...] = ()
    found: tuple[Found, ...] = ()
    reached: frozenset[str] = frozenset()
    left: frozenset[Place] = frozenset()
    """The places as they will be when the page is committed."""
    adder: str = "idle"
    """Who makes g: idle, locked (b), saw live or saw terminated, gone."""
    holder: str = "idle"
    forcer: str = "idle"
    """idle, waits (its statement has begun while a page holds the place), gone."""
    deaths: int = 1
    status: dict[str, str] = field(init=False, compare=False, hash=False)
    locked: dict[str, str] = field(init=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", dict(self.jobs))
        object.__setattr__(self, "locked", dict(self.locks))

    def children(self, job: str) -> list[str]:
        """Those that are committed, by name."""
        return sorted((one for one in self.status if PARENT[one] == job), key=NAME.__getitem__)


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    yield from _page(world, mistake)
    yield from _adder(world, mistake)
    yield from _holder(world)
    yield from _forcer(world, mistake)
    if world.forced and "n" not in world.status:
        yield replace(world, jobs=(*world.jobs, ("n", "live")))


def _page(world: World, mistake: str | None) -> Iterator[World]:
    match world.page:
        case "idle" if world.places and world.forcer != "waits":
            taken = tuple(sorted(world.places, key=lambda place: -IDS[place[0]]))
            yield replace(world, page="took", taken=taken)
        case "took":
            yield replace(world, page="found", found=tuple(_find(world)))
        case "found":
            mine = {job for job, _ in world.found if job not in world.locked}
            locks = (*world.locks, *((job, "page") for job in sorted(mine)))
            yield replace(world, page="locked", locks=locks, reached=frozenset(_joined(world, mine)))
        case "locked":
            yield replace(world, page="went on", left=frozenset(_go_on(world, mistake)))
        case "went on":
            jobs = tuple((job, "terminated" if job in world.reached else status) for job, status in world.jobs)
            yield _over(replace(world, jobs=jobs, places=world.left))
    if world.deaths and world.page != "idle":
        yield replace(_over(world), deaths=world.deaths - 1)


def _over(world: World) -> World:
    """End the page, committed or not; a forced run that has waited for it goes on with what it finds."""
    locks = tuple(lock for lock in world.locks if lock[1] != "page")
    return replace(world, page="idle", taken=(), found=(), reached=frozenset(), left=frozenset(), locks=locks)


def _find(world: World) -> Iterator[Found]:
    level: list[Found] = []
    for job, itself, after in world.taken:
        level += [(job, None)] if itself else [(one, job) for one in world.children(job) if NAME[one] > after]
    count = 0
    while level:
        below: list[Found] = []
        for job, parent in level:
            if count == PAGE:
                return
            count += 1
            yield job, parent
            below += [(one, job) for one in world.children(job)]
        level = below


def _joined(world: World, mine: set[str]) -> Iterator[str]:
    joined = {job for job, itself, _ in world.taken if not itself}
    for job, parent in world.found:
        if job in mine and (parent is None or parent in joined):
            joined.add(job)
            yield job


def _go_on(world: World, mistake: str | None) -> Iterator[Place]:
    """Yield the places that the page leaves, as `_leave` and `go_on` decide."""
    there, whole = {job for job, _ in world.found}, len(world.found) < PAGE
    passes_over = mistake == "a job that others have locked is passed over"
    waiting = {
        job for job, itself, _ in world.taken
        if itself and job not in world.reached and (not passes_over if job in there else not whole)
    }  # fmt: skip
    yield from (place for place in world.taken if place[0] in waiting)
    first = {job: after for job, _, after in world.taken if job not in waiting}
    last = dict(first)
    last.update({parent: NAME[job] for job, parent in world.found if parent is not None})
    for job in sorted(first.keys() | world.reached):
        since, until = first.get(job, 0), last.get(job, 0)
        if mistake == "a place is removed with the first page" and job in first:
            continue
        children = world.children(job)
        if mistake == "the children are those that were read before the lock" and job not in first:
            children = [one for one, parent in world.found if parent == job]
        if any(NAME[one] > until for one in children):
            yield job, False, until
        new = {one for one in children if since < NAME[one] <= until} - first.keys() - world.reached - waiting
        yield from ((one, True, 0) for one in new if one not in there or not passes_over)


def _adder(world: World, mistake: str | None) -> Iterator[World]:
    match world.adder:
        case "idle":
            yield replace(world, adder="gone")
            if mistake == "a new child is not judged under the lock":
                yield replace(world, adder=f"saw {world.status['b']}")
            elif "b" not in world.locked:
                yield replace(world, adder="locked", locks=(*world.locks, ("b", "adder")))
        case "locked":
            yield replace(world, adder=f"saw {world.status['b']}")
        case "saw live":
            yield _unlocked(replace(world, adder="gone", jobs=(*world.jobs, ("g", "live"))), "adder")
        case "saw terminated":
            yield _unlocked(replace(world, adder="gone"), "adder")


def _holder(world: World) -> Iterator[World]:
    if world.holder == "idle":
        yield replace(world, holder="gone")
        if "a" not in world.locked:
            yield replace(world, holder="holds", locks=(*world.locks, ("a", "holder")))
    elif world.holder == "holds":
        yield _unlocked(replace(world, holder="gone"), "holder")


def _unlocked(world: World, who: str) -> World:
    return replace(world, locks=tuple(lock for lock in world.locks if lock[1] != who))


def _forcer(world: World, mistake: str | None) -> Iterator[World]:
    waits = world.page != "idle" and mistake != "a forced run does not wait for a page"
    match world.forcer:
        case "idle" if mistake == "a forced run leaves the place of its job":
            yield replace(world, forcer="gone", forced=True)
        case "idle" if waits:
            yield replace(world, forcer="waits")
        case "idle":
            yield _split(world, world.places)
        case "waits" if world.page == "idle" and mistake == "a page replaces the row of a place":
            yield _split(world, world.places - {place for place in world.places if place[0] == "R"})
        case "waits" if world.page == "idle":
            yield _split(world, world.places)
    if world.forcer == "idle":
        yield replace(world, forcer="gone")


def _split(world: World, seen: Sequence[Place] | frozenset[Place]) -> World:
    """Have the children that R has now terminated one by one: its place, as it is seen, gives way to theirs."""
    mine = {place for place in seen if place[0] == "R"}
    theirs = {one for _, _, after in mine for one in world.children("R") if NAME[one] > after}
    kept = {place for place in world.places - mine if place[0] not in theirs}
    return replace(world, forcer="gone", forced=True, places=frozenset(kept | {(one, True, 0) for one in theirs}))


def wrong(world: World) -> str | None:
    """Say what must not be where nothing more can happen."""
    if world.places:
        return "places are left"
    for job in ("a", "b", "g"):
        if world.status.get(job) == "live":
            return f"{job} was below R, and is not terminated"
    return "n was made by the forced run, and is terminated" if world.status.get("n") == "terminated" else None

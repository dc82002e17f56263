"""Every interleaving of two messages that one publisher publishes on a channel with their delivery to two subscribers.

The publisher commits a row for each message, then delivers, one page (here: one subscriber) in each transaction; or, if
no older message waits, it delivers to all in the transaction that publishes. It may die at any time; two more deliver
too, as the sweeper and another publisher of the channel do. Meanwhile each subscriber is locked by its claim or its
unit, and takes what it then sees. Rules are those of `store/publications.py` and
`operations/changes/follow_up.py`; each of `MISTAKES` is what one is tempted to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.protocol_model.walk import replace

MISTAKES = (
    "no lock on the publication", "any publication that is free", "the publication ends before its last page",
    "remembers the place in another transaction", "wakes only those that it has locked",
    "waits for a locked subscriber", "wakes the next page with this one", "delivers at once though older ones wait",
)  # fmt: skip

PAGES = 2

Open = tuple[int, int, bool]
"""A page's transaction: which publication, its page, and whether it has locked the page's subscriber."""


@dataclass(frozen=True)
class Subscriber:
    """A subscribed job and its port."""

    port: tuple[int, ...] = ()
    """The messages that have arrived, in their order."""
    taken: int = 0
    """How many of them its runs have read."""
    owed: bool = False
    noted: bool = False
    locked: bool = False
    sees: tuple[int, bool] = (0, False)
    """While it is locked by its run: how many packets and whether a noted ask the run has seen."""
    claims: int = 0
    """How many more claims happen while it is not asked: a run for another reason."""


@dataclass(frozen=True)
class World:
    """What the store holds, and where everybody stands."""

    rows: tuple[int | None, ...] = (None, None)
    """Of each message's publication the next page; None: there is no row."""
    next: int = 0
    """The message that the publisher publishes next."""
    alive: bool = True
    open: tuple[Open | None, ...] = (None, None, None)
    """The pages that are being delivered: by the publisher, and by two others."""
    late: tuple[tuple[int, int] | None, ...] = (None, None, None)
    """Places that are still to be remembered, by a mistake."""
    subscribers: tuple[Subscriber, ...] = (Subscriber(claims=1), Subscriber(claims=1))
    broken: str | None = None


def steps(world: World, mistake: str | None, _: str) -> Iterator[World]:
    """Yield what may be next."""
    if world.broken:
        return
    if world.alive:
        if world.open[0] is None and world.late[0] is None and world.next < len(world.rows):
            rows = _with(world.rows, world.next, 0)
            yield replace(world, rows=rows, next=world.next + 1)
            if not any(row is not None for row in world.rows) or mistake == "delivers at once though older ones wait":
                yield _at_once(world, mistake)
        yield replace(world, alive=False, open=_with(world.open, 0, None), late=_with(world.late, 0, None))
    for place in range(0 if world.alive else 1, len(world.open)):
        if world.late[place] is not None:
            yield _remembered(world, place)
        elif world.open[place] is None:
            yield from _begins(world, place, mistake)
        else:
            yield _delivered(world, place, mistake)
    for number in range(PAGES):
        yield from _runs(world, number)


def _at_once(world: World, mistake: str | None) -> World:
    """The transaction that publishes delivers too, to all: it takes the locks that are free, and commits."""
    done = replace(world, next=world.next + 1)
    for page in range(PAGES):
        opened = replace(done, open=_with(done.open, 0, (world.next, page, _is_free(world, page))))
        done = replace(_delivered(opened, 0, mistake), rows=world.rows, late=world.late)
    return done


def _is_free(world: World, page: int) -> bool:
    by_others = any(other is not None and other[1:] == (page, True) for other in world.open)
    return not world.subscribers[page].locked and not by_others


def _begins(world: World, place: int, mistake: str | None) -> Iterator[World]:
    waiting = [number for number, page in enumerate(world.rows) if page is not None]
    locked = {open_[0] for open_ in world.open if open_ is not None}
    for number in waiting if mistake == "any publication that is free" else waiting[:1]:
        if number in locked and mistake != "no lock on the publication":
            continue
        page = world.rows[number]
        assert page is not None
        if not _is_free(world, page) and mistake == "waits for a locked subscriber":
            yield replace(world, broken="a delivery waits for somebody's lock")
            return
        yield replace(world, open=_with(world.open, place, (number, page, _is_free(world, page))))


def _delivered(world: World, place: int, mistake: str | None) -> World:
    """The page's transaction commits: its packet, its ask, and the publication's place."""
    number, page, has_lock = world.open[place] or (0, 0, False)
    to_wake = (page + 1) % PAGES if mistake == "wakes the next page with this one" else page
    found = world.subscribers[page]
    if number in found.port:
        return replace(world, broken="a message has arrived twice")
    subscribers = _with(world.subscribers, page, replace(found, port=(*found.port, number)))
    woken = subscribers[to_wake]
    if has_lock and to_wake == page:
        woken = replace(woken, owed=True)
    elif mistake != "wakes only those that it has locked":
        woken = replace(woken, noted=True)
    done = replace(world, open=_with(world.open, place, None), subscribers=_with(subscribers, to_wake, woken))
    if mistake == "remembers the place in another transaction":
        return replace(done, late=_with(world.late, place, (number, page + 1)))
    after = PAGES if mistake == "the publication ends before its last page" else page + 1
    return replace(done, rows=_with(world.rows, number, None if after >= PAGES else after))


def _remembered(world: World, place: int) -> World:
    number, page = world.late[place] or (0, 0)
    rows = _with(world.rows, number, None if page >= PAGES else page)
    return replace(world, late=_with(world.late, place, None), rows=rows)


def _runs(world: World, number: int) -> Iterator[World]:
    """A claim of the subscriber's locks it; its run takes what the claim has seen. Noted asks are applied when free."""
    one = world.subscribers[number]
    if one.locked:
        seen, saw_note = one.sees
        yield _put(world, number, replace(one, locked=False, taken=seen, noted=one.noted and not saw_note))
        return
    if any(open_ is not None and open_[1:] == (number, True) for open_ in world.open):
        return
    if one.noted:
        yield _put(world, number, replace(one, noted=False, owed=True))
    if one.owed:
        yield _put(world, number, replace(one, owed=False, locked=True, sees=(len(one.port), one.noted)))
    elif one.claims:
        claims = one.claims - 1
        yield _put(world, number, replace(one, locked=True, sees=(len(one.port), one.noted), claims=claims))


def _put(world: World, number: int, subscriber: Subscriber) -> World:
    return replace(world, subscribers=_with(world.subscribers, number, subscriber))


def _with(several: tuple[Any, ...], place: int, one: Any) -> tuple[Any, ...]:
    return (*several[:place], one, *several[place + 1 :])


def wrong(world: World) -> str | None:
    """Say what must not be, where nothing more can happen or something was broken on the way."""
    if world.broken:
        return world.broken
    published = tuple(range(world.next))
    for one in world.subscribers:
        if sorted(one.port) != list(published):
            return "a message has not arrived"
        if one.port != published:
            return "the messages have arrived in another order"
        if one.taken < len(one.port):
            return "a packet is unread for ever"
    return None

"""Going through all that can happen in one of the small models, such as `copies.py` or `room.py`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

W = TypeVar("W")

ENDLESS = "it goes on for ever"


def replace(world: W, /, **changes: Any) -> W:
    """Return a world with changes. It is called a million times: `dataclasses.replace` would take far longer."""
    new = object.__new__(type(world))
    new.__dict__.update(world.__dict__, **changes)
    assert len(new.__dict__) == len(world.__dict__), f"a world has no {changes.keys() - world.__dict__.keys()}"
    return new


def walk(
    model: ModuleType, mistake: str | None = None, *, on_lost: str = "requeue", only_first: bool = False
) -> tuple[int, dict[str, list[Any]]]:
    """Go from the model's first `World` by all its `steps`, with one of its mistakes or none.

    Returns how many worlds there are, and a way to each thing that is `wrong` where nothing more can happen. A world
    from which no way leads to such an end is wrong too (`ENDLESS`). With `only_first` the walk stops at the first thing
    that is wrong.
    """
    with _no_collections():
        return _walked(model, mistake, on_lost, only_first)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage: of the million objects that are made all are kept, or freed without it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _walked(model: ModuleType, mistake: str | None, on_lost: str, only_first: bool) -> tuple[int, dict[str, list[Any]]]:
    start = model.World()
    places = {start: 0}
    worlds = [start]
    before = [0]
    found: dict[str, int] = {}
    ends: list[int] = []
    reached_from: list[list[int]] = [[]]
    for place, world in enumerate(worlds):  # the shortest ways first
        following = list(model.steps(world, mistake, on_lost))
        if not following:
            ends.append(place)
            message = model.wrong(world)
            if message is not None:
                found.setdefault(message, place)
                if only_first:
                    break
        for after in following:
            there = places.setdefault(after, len(worlds))
            if there == len(worlds):
                worlds.append(after)
                before.append(place)
                reached_from.append([])
            reached_from[there].append(place)
    else:
        endless = _first_without_end(ends, reached_from)
        if endless is not None:
            found[ENDLESS] = endless
    return len(worlds), {message: [worlds[step] for step in _way(before, place)] for message, place in found.items()}


def _first_without_end(ends: list[int], reached_from: list[list[int]]) -> int | None:
    """Return the first place from which no way leads to an end."""
    has_end = bytearray(len(reached_from))
    waiting = list(ends)
    while waiting:
        place = waiting.pop()
        if not has_end[place]:
            has_end[place] = True
            waiting += reached_from[place]
    endless = has_end.find(0)
    return None if endless < 0 else endless


def _way(before: list[int], place: int) -> list[int]:
    """Return the shortest way from the first place to this one."""
    way = [place]
    while way[-1]:
        way.append(before[way[-1]])
    return way[::-1]

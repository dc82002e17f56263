"""Going through all that can happen in one of the small models, such as `copies.py` or `room.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeVar

W = TypeVar("W")


def replace(world: W, /, **changes: Any) -> W:
    """Return a world with changes. It is called a million times: `dataclasses.replace` would take far longer."""
    new = object.__new__(type(world))
    new.__dict__.update(world.__dict__, **changes)
    assert len(new.__dict__) == len(world.__dict__), f"a world has no {changes.keys() - world.__dict__.keys()}"
    return new


def walk(
    model: ModuleType, mistake: str | None = None, *, on_lost: str = "requeue"
) -> tuple[int, dict[str, list[Any]]]:
    """Go from the model's first `World` by all its `steps`, with one of its mistakes or none.

    Returns how many worlds there are, and a way to each thing that is `wrong` where nothing more can happen.
    """
    start = model.World()
    before: dict[Any, Any] = {start: None}
    waiting = [start]
    found: dict[str, list[Any]] = {}
    for world in waiting:  # the shortest ways first
        following = list(model.steps(world, mistake, on_lost))
        message = None if following else model.wrong(world)
        if message is not None and message not in found:
            found[message] = way = [world]
            while (step := before[way[-1]]) is not None:
                way.append(step)
        for after in following:
            if after not in before:
                before[after] = world
                waiting.append(after)
    return len(before), {message: way[::-1] for message, way in found.items()}

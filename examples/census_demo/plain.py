"""The same census without jobs, as one loop in one process: for the plan, and to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from code_census import UNPARSABLE, count, entries, is_directory


def walk(path: Path, one_in: int) -> Iterator[tuple[Path, list[Path]]]:
    """Yield each directory of a census with the files that are counted in it."""
    ahead = [path]
    while ahead:
        here = ahead.pop()
        found = entries(here, one_in)
        below = {entry for entry in found if is_directory(entry)}
        yield here, [entry for entry in found if entry not in below]
        ahead += below


def count_all(path: Path, one_in: int, counted: Callable[[], None]) -> tuple[dict[str, int], set[str]]:
    """Count everything, calling `counted` after each file; returns the totals, and the files that cannot be read."""
    totals: Counter[str] = Counter()
    unparsable = set()
    for _, files in walk(path, one_in):
        for file in files:
            totals["files"] += 1
            try:
                totals.update(count(file))
            except UNPARSABLE:
                totals["unparsable"] += 1
                unparsable.add(str(file))
            counted()
    return dict(totals), unparsable

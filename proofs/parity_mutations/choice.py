"""Which items of the page are tried: a sample that a seed decides."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping


def countable(tests: Mapping[str, list[str]]) -> list[str]:
    """Return the items that have tests, in the order of their ids."""
    return sorted(item for item, those in tests.items() if those)


def choose(items: Collection[str], count: int, seed: int) -> list[str]:
    """Return so many of the items, all if there are fewer, in the order of their ids; the same ones for a seed."""
    return sorted(random.Random(seed).sample(sorted(items), min(count, len(items))))

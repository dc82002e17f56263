"""Numbers with their nouns, as people read them."""

from __future__ import annotations

from collections.abc import Iterable


def counted(count: int, one: str, many: str) -> str:
    """Return a number with its noun, or its verb."""
    return f"{count:,} {one if count == 1 else many}"


def first_of(texts: Iterable[str], *, most: int = 5, separator: str = ", ") -> str:
    """Return the first texts, and how many more there are."""
    every = list(texts)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return separator.join(every[:most]) + more

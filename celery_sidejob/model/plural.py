"""Numbers with their nouns, as people read them."""

from __future__ import annotations


def counted(count: int, one: str, many: str) -> str:
    """Return a number with its noun, or its verb."""
    return f"{count:,} {one if count == 1 else many}"

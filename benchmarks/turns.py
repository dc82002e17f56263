"""Sides that are measured in turns, and what one side is of another: the median over rounds, with its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

SURE = 0.95


def take_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each side once a round, in changing order; the first round is for caches, connections and plans."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            figure = sides[side]()
            if number:
                found[side].append(figure)
    return found


@dataclass(frozen=True)
class Median:
    """A median over rounds, and between which two figures it lies with 95 % certainty, whatever their distribution."""

    middle: float
    lower: float
    upper: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> Median:
        """Of figures from independent rounds; few of them say little, and their interval is all of them."""
        ranked = sorted(figures)
        skipped = _skipped(len(ranked))
        return cls(median(ranked), ranked[skipped], ranked[-1 - skipped])

    @classmethod
    def of_ratios(cls, ours: Sequence[float], theirs: Sequence[float]) -> Median:
        """Of what our figure is of theirs inside a round: what slows a round down slows both."""
        return cls.of([one / other for one, other in zip(ours, theirs, strict=True)])

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.lower:.2f} to {self.upper:.2f})"


def _skipped(count: int) -> int:
    """How many of the ranked figures are left out at either end: of the median's binomial interval."""
    outside, skipped = 2 / 2**count, 0
    while outside + (further := 2 * comb(count, skipped + 1) / 2**count) <= 1 - SURE:
        outside, skipped = outside + further, skipped + 1
    return skipped

"""When which fault happens: one every few seconds, drawn from a seed, each for a while, sometimes two at once.

They are drawn as cards from a shuffled deck, so that no kind is left out for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from proofs.trial.faults import FAULTS, Happening, Scenery, freeze_broker, kill_broker

TWO_AT_ONCE = 0.2
"""How often a fault is followed at once by another."""
GAP_S = (3.0, 9.0)
"""Between the beginnings of two faults."""


@dataclass
class _Present:
    name: str
    happening: Happening
    ends_at: float
    block: AbstractContextManager[str]


class Schedule:
    """Has faults happen, one every few seconds."""

    def __init__(self, scenery: Scenery, *, say: Callable[[str], None]) -> None:
        self.scenery = scenery
        self.history: list[Happening] = []
        self._say = say
        self._deck: list[str] = []
        self._present: list[_Present] = []
        self._next_at = time.monotonic() + GAP_S[0]

    def tick(self) -> None:
        """End what is over, and begin what is due."""
        now = time.monotonic()
        for fault in [present for present in self._present if present.ends_at <= now]:
            self._heal(fault)
        if now >= self._next_at:
            self._begin()
            while self.scenery.dice.random() < TWO_AT_ONCE:
                self._begin()
            self._next_at = time.monotonic() + self.scenery.dice.uniform(*GAP_S)

    def is_on(self, what: str) -> bool:
        """Whether a fault is there on this just now."""
        return any(FAULTS[present.name].on == what for present in self._present)

    def heal_all(self) -> None:
        """End all that is there, in the order in which it began."""
        for fault in list(self._present):
            self._heal(fault)

    def _begin(self) -> None:
        name = self._draw()
        if name is None:
            return
        fault, scenery = FAULTS[name], self.scenery
        scenery.now = happening = Happening(name, time.time())
        lasts_s = scenery.dice.uniform(*fault.lasts_s)
        block = fault.act(scenery)
        detail = block.__enter__()
        self.history.append(happening)
        self._present.append(_Present(name, happening, time.monotonic() + lasts_s, block))
        self._say(name + (f" ({detail})" if detail else "") + (f" for {lasts_s:.1f} s" if lasts_s else ""))

    def _heal(self, fault: _Present) -> None:
        self._present.remove(fault)
        fault.block.__exit__(None, None, None)
        fault.happening.ended_at = time.time()

    def _draw(self) -> str | None:
        """The next card whose fault can be there beside those that are."""
        taken = {FAULTS[present.name].on for present in self._present}
        for _ in range(2):
            for name in self._deck:
                if not taken & {FAULTS[name].on, FAULTS[name].needs}:
                    self._deck.remove(name)
                    return name
            self._deck += self._shuffled()
        return None

    def _shuffled(self) -> list[str]:
        without_server = self.scenery.ground.broker.server is None
        cards = [
            name
            for name, fault in FAULTS.items()
            for _ in range(fault.cards)
            if not (without_server and fault.act in (kill_broker, freeze_broker))
        ]
        self.scenery.dice.shuffle(cards)
        return cards

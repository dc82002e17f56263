"""Views of the dead set: pages of its entries, and their newest groups."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..deadset import DeadEntry, DeadSet, which_of
from ..operations.ledger import burials
from ..store import dead, stats

LOOK_S = 0.06
"""For how many seconds a page looks through entries that no index finds."""


class DeadViews(DeadSet):
    """The dead set, as pages show it."""

    def page(
        self, *, limit: int, before: int | str = 0, **which: str | None
    ) -> tuple[list[DeadEntry], int | str | None]:
        """Return entries that match the filters of `list`, the newest of each store first, before the id `before`.

        Looks through entries for `LOOK_S` only. Returns also the id before which to go on; None at the end.
        """
        chosen = which_of(**which)
        first, number = self._place_of(before)
        found: list[DeadEntry] = []
        goes_on: int | str | None = None
        began, until = time.monotonic(), math.inf  # it looks once, however late it is

        def read(store: Any) -> Iterator[DeadEntry]:
            nonlocal goes_on, until
            place: int | None = number if store is first else 0
            while place is not None:
                goes_on = burials.entry_id_of(self._stores.label_of(store), place)
                if len(found) == limit or time.monotonic() > until:
                    return
                look = partial(dead.look, before=place or None, limit=limit - len(found), which=chosen)
                rows, place = self._ask(store, look)
                until = began + LOOK_S
                yield from [self._entry(store, row) for row in rows]
            goes_on = None

        for entry in self._of_each(read, lambda store: store.place >= first.place and len(found) < limit):
            found.append(entry)  # separately: the rest is computed from their number
        return found, goes_on

    def newest_groups(self) -> tuple[dict[str, int], bool]:
        """Count the newest 10,000 entries of each store by their failure group, and tell whether there are more."""
        counts: Counter[str] = Counter()
        for row in self._of_each(lambda store: self._ask(store, stats.dead_groups)):
            counts[row.group] += row.entries
        return dict(counts.most_common()), counts.total() >= stats.GROUPED

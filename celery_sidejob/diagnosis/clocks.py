"""The differences between clocks."""

from __future__ import annotations

from collections.abc import Iterator

from ..model.finding import Finding, warning, well

SKEW_S = 2.0
"""By how much clocks may differ: `expires` of tasks depends on them, and the times in logs do."""


def difference(whose: str, skew_s: float) -> Iterator[Finding]:
    """Grade by how much the clock of a machine or a worker differs from the database's."""
    if abs(skew_s) > SKEW_S:
        side = "behind" if skew_s > 0 else "ahead of"
        yield warning(
            "clock", f"the clock of {whose} is {abs(skew_s):.1f} s {side} the database's",
            meaning="Each eta= or expires= that is computed there is off by that much, and so are the times in its "
            "logs. Leases and timers are not: they use only the database's clock.",
            remedy="Let NTP or chrony set both clocks.",
        )  # fmt: skip
    else:
        yield well("clock", f"the clock of {whose} differs from the database's by {abs(skew_s):.2f} s")

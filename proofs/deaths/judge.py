"""What a storm has left: what was lost, what ran twice, and how long before which accident it had begun."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from proofs.deaths.accidents import Accident

WINDOW_S = 0.1
"""How long before its worker's death a task that runs twice may have begun, at most.

The transport promises about 10 ms, 20 with the pool solo. On a busy machine a thread that is ready may wait as long
again for its processor, several times over.
"""
AFTER_S = 6.0
"""How long after a worker has lost its Postgres it may still begin what it holds, and cannot acknowledge."""
PREFETCH = 8
"""The most messages that a worker of a storm holds."""


@dataclass(frozen=True)
class Happened:
    """An accident, in seconds since 1970, and the workers that it met."""

    accident: Accident
    at: float
    workers: Set[int]
    """Their session ids."""


@dataclass(frozen=True)
class Begin:
    """A run of a task."""

    worker: int
    at: float


@dataclass(frozen=True)
class Outcome:
    """The verdict."""

    happened: Counter[Accident]
    sent: int
    unknown: int
    """Messages of which the sender does not know whether they were sent: Postgres died meanwhile."""
    lost: Sequence[int]
    lost_early: Sequence[int]
    """Of tasks that were acknowledged early: they end with their worker."""
    doubled: Mapping[Accident | None, Sequence[float]]
    """Runs that were not the last, by what happened to their worker next: how long before that they had begun."""
    recovered_s: float
    """From the end of the last accident until all had run."""
    left: Sequence[str]
    """What should not be in Postgres any more, and deadlocks."""
    in_order: bool
    """Whether messages of all priorities, sent at the end, ran in their order."""

    @property
    def wrong(self) -> list[str]:
        """Return which promises were broken."""
        found = [f"{len(self.lost)} lost: {self.lost[:10]}"] if self.lost else []
        if len(self.lost_early) > self._kills:
            found.append(f"{len(self.lost_early)} that were acknowledged early were lost")
        for accident, before_s in self.doubled.items():
            if accident is None:
                found.append(f"{len(before_s)} ran twice though nothing had happened to their worker")
            elif accident.kills and max(before_s) > WINDOW_S:
                found.append(f"one ran twice that had begun {max(before_s):.3f} s before it was {accident.value}")
            elif len(before_s) > 2 * PREFETCH * self.happened[accident]:
                found.append(f"{len(before_s)} ran twice: {accident.value}")
        return found + [f"left: {one}" for one in self.left] + ([] if self.in_order else ["not in order"])

    def __str__(self) -> str:
        lines = [f"{self.sent} tasks sent, {self.unknown} perhaps; lost: {len(self.lost)}"]
        lines += [f"acknowledged early and ended with their worker: {len(self.lost_early)}"]
        for accident, count in self.happened.items():
            before_s = sorted(self.doubled.get(accident, ()))
            line = f"{count:5} x {accident.value}: {len(before_s)} ran twice"
            if before_s and accident.kills:
                middle, most = before_s[len(before_s) // 2], before_s[-1]
                line += f", begun {1000 * middle:.1f} ms before (median), {1000 * most:.1f} ms (most)"
            lines.append(line)
        lines.append(f"all had run {self.recovered_s:.1f} s after the last accident")
        return "\n".join([*lines, *(f"WRONG: {one}" for one in self.wrong)])

    @property
    def _kills(self) -> int:
        return sum(count for accident, count in self.happened.items() if accident.kills)


def begins_in(text: str) -> dict[int, list[Begin]]:
    """Return the runs of each task, from what `proofs.killed_app` has noted."""
    begins: dict[int, list[Begin]] = defaultdict(list)
    for line in text.splitlines():
        number, worker, at = line.split()
        begins[int(number)].append(Begin(int(worker), float(at)))
    return begins


def doubled(begins: Mapping[int, Sequence[Begin]], happened: Sequence[Happened]) -> dict[Accident | None, list[float]]:
    """Sort the runs that were not a task's last by the accident that explains them best."""
    found: dict[Accident | None, list[float]] = defaultdict(list)
    for runs in begins.values():
        for run in sorted(runs, key=lambda one: one.at)[:-1]:
            explained = _explained(run, [one for one in happened if run.worker in one.workers])
            found[explained and explained.accident].append(explained.at - run.at if explained is not None else 0.0)
    return found


def _explained(run: Begin, met: Sequence[Happened]) -> Happened | None:
    """Return the worker's death about then, or that its Postgres was away, or else what happened next to it.

    A process of its pool may still begin a task when the main process was killed.
    """
    near = [one for one in met if abs(one.at - run.at) <= WINDOW_S and (one.accident.kills or one.at >= run.at)]
    if near:
        return min(near, key=lambda one: abs(one.at - run.at))
    away = [one for one in met if not one.accident.kills and -AFTER_S <= one.at - run.at < 0]
    following = [one for one in met if one.at >= run.at]
    return max(away, key=lambda one: one.at) if away else min(following, key=lambda one: one.at, default=None)

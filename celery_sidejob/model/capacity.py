"""Capacity pools: their declarations, and how a work gets slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .checks import is_number, shown
from .errors import InvalidValueError
from .names import why_not_name

MOST_SLOTS = 2**31 - 1
"""The largest limit of a pool."""
MOST_SHARDS = 1024
MOST_WEIGHT = 2**15 - 1

COVERS = ("queued", "running")
ON_FULL = ("refuse", "wait", "drop")


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The declaration of a pool. Without a `limit` only the name is known: the task's code is elsewhere.

    `covers`: a work holds its slot from the call until it is done, or only from the moment it may run to the end of
    that run.
    """

    name: str
    limit: int | None
    shards: int = 1
    covers: str = "queued"

    def check(self) -> PoolSpec:
        """Return the declaration, or raise InvalidValueError for one that no pool can have."""
        problem = why_not_name(self.name)
        if problem is not None:
            raise InvalidValueError(f"{shown(self.name)} cannot be the name of a capacity pool: {problem}.")
        check_limit(self.name, self.limit)
        if not is_number(self.shards, least=1, most=MOST_SHARDS):
            raise InvalidValueError(
                f"shards of capacity pool {self.name!r} is a whole number from 1 to {MOST_SHARDS}, not "
                f"{shown(self.shards)}."
            )
        check_shards(self.name, self.limit or 0, self.shards)
        if self.covers not in COVERS:
            raise InvalidValueError(
                f"covers of capacity pool {self.name!r} is one of {', '.join(map(repr, COVERS))}, not "
                f"{shown(self.covers)}."
            )
        return self


def check_limit(name: str, limit: Any) -> None:
    """Raise InvalidValueError for a limit that no pool can have."""
    if not is_number(limit, least=1, most=MOST_SLOTS):
        raise InvalidValueError(
            f"The limit of capacity pool {name!r} is a whole number from 1 to {MOST_SLOTS}, not {shown(limit)}."
        )


def check_shards(name: str, limit: int, shards: int) -> None:
    """Raise InvalidValueError if a shard would be without a slot."""
    if shards > limit:
        raise InvalidValueError(
            f"Capacity pool {name!r} has {limit} slots and {shards} shards: a shard needs one slot at least."
        )


def parts_of(limit: int, shards: int) -> list[int]:
    """Return the slots of each shard: together they are the limit, and the first shards have the remainder."""
    each, rest = divmod(limit, shards)
    return [each + (shard < rest) for shard in range(shards)]


@dataclass(frozen=True, slots=True)
class Admission:
    """A work's way into a pool: how many slots it takes, and whether a full pool refuses it."""

    pool: PoolSpec
    weight: int = 1
    mode: Literal["refuse", "exceed", "wait"] = "refuse"
    """What happens at a full pool: the call is refused, takes its slots all the same, or makes a work that waits.

    A work without a caller waits too: it follows another work, or its time has come.
    """

    @classmethod
    def of(cls, pool: PoolSpec, weight: int = 1) -> Admission:
        """Return the admission of a call; if the pool's slots are for runs, the work is made and waits."""
        return cls(pool, weight, "wait" if pool.covers == "running" else "refuse")

    @property
    def is_judged(self) -> bool:
        """Whether the transaction that makes the work takes its slots, or is refused."""
        return self.mode != "wait"

    @property
    def refuses(self) -> bool:
        """Whether a full pool refuses it."""
        return self.mode == "refuse"

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a job that has its slots in this way."""
        runs = self.pool.covers == "running"
        return {"pool": self.pool.name, "pool_weight": self.weight, "pool_runs": runs}

    @classmethod
    def stays(cls, pool: str | None, given: Admission | None, then: Admission | None) -> bool:
        """Tell whether a work stays in its `pool` when it goes on as something else.

        `given` and `then`: how the work got slots before, and how it gets them afterwards, if no call names a pool. A
        work stays in a pool that its call has named.
        """
        if pool == (then and then.pool.name):
            return True
        return pool is not None and pool != (given and given.pool.name)

    def check(self) -> Admission:
        """Return the admission, or raise InvalidValueError for a weight that no work can have."""
        if not is_number(self.weight, least=1, most=MOST_WEIGHT):
            raise InvalidValueError(f"weight is a whole number from 1 to {MOST_WEIGHT}, not {shown(self.weight)}.")
        return self

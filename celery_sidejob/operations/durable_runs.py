"""A run of an ordinary durable task: what its process knows of it, and whether its row is still its own.

The order is lock (`durable_locks.py`), body, result, then removal together with the rows of what follows it
(`durable_ends.py`). `docs/durable.md` has what a death in each gap gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..model.durable import Content, Key, Message
from ..model.errors import LeaseLostError, StoreUnavailableError
from .runtime import Runtime

WAITS, WRITING, HELD, REFUSED, ENDED, OVER = "waits", "writing", "held", "refused", "ended", "over"
"""How it stands with a lock that is written later: see `LateLock`."""


class Claim(Protocol):
    """The right to publish the body of a chord, which the result backend gives to one at a time, for a while."""

    messages: Sequence[Message]
    """The body, among what follows the run that has it."""

    def hold(self) -> bool:
        """Have it for a while more; False if somebody else has had it, and the body is known.

        Raises ClaimedElsewhereError while that is open.
        """
        ...

    def settle(self) -> None:
        """Have the backend forget the chord, whose body is kept; never raises. Who dies before leaves it to expire."""
        ...


class ClaimedElsewhereError(StoreUnavailableError):
    """Somebody else is about to publish the body of a chord, or has died with that: this has to be tried again."""


@dataclass(eq=False, slots=True)
class Run:
    """A run of a durable task in this process, from its lock to its end."""

    key: Key
    task: str
    worker_id: int
    runtime: Runtime
    """The runtime of the store that has the row."""
    content: Content
    """What it runs."""
    in_body: bool = False
    body_is_over: bool = False
    moved: bool = False
    """The row goes on as another message: a retry, or what replaces this task."""
    is_lost: bool = False
    """It does not count: its body has left and the row was given back, or the row was taken from it."""
    is_revoked: bool = False
    """Somebody has terminated it, and its worker has buried it; its body, in a thread, goes on."""
    result_is_stored: bool = False
    follows: list[Message] = field(default_factory=list)
    """Callbacks, the rest of a chain and the body of a chord, kept by the commit that removes this run's row."""
    claim: Claim | None = None
    """What is to be held for that commit, if it has the body of a chord."""
    has_waited: bool = False
    """Its end has waited for an absent store for as long as an end may."""
    end_is_unknown: bool = False
    """An end whose answer was lost may have removed the row."""
    has_ended: bool = False
    """Its end, which was given up once, was written later."""
    traceback: str | None = None
    late: LateLock | None = None
    """How it stands with its lock, where that is written later."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the worker wants to stop, or has ended this run."""


@dataclass(eq=False, slots=True)
class LateLock:
    """How it stands with the lock of one run."""

    run: Run
    max_losses: int
    began_at: float
    state: str = WAITS
    """Not written yet; being written; held; refused, as another one has the row or it is gone or doomed; the run has
    ended well, and its row is to be removed; over: nothing is to be written any more."""
    then: str | None = None
    """What became of the run while its lock was being written: ended, or over."""
    is_unknown: bool = False
    """An end whose answer was lost may have been applied."""


_BODY: ContextVar[Run | Literal["inline"] | None] = ContextVar("celery_sidejob_durable", default=None)
"""Of which run the body is that runs here; "inline": one of no run."""


@contextmanager
def in_body(run: Run | None) -> Iterator[None]:
    """Make the block the body of a run, also for threads that are given the context.

    None: that of a task called as a function or eagerly, which has no row. Within the body of a run it is part of that.
    """
    token = _BODY.set(run or _BODY.get() or "inline")
    try:
        yield
    finally:
        _BODY.reset(token)


def current() -> Run | Literal["inline"] | None:
    """Return the run whose body runs here; "inline" in a body of no run, None outside of bodies."""
    return _BODY.get()


def is_to_stop() -> bool:
    """Tell whether the durable task whose body runs here should come to its end; False outside of one."""
    run = _BODY.get()
    return isinstance(run, Run) and run.stopping()


def lease_lost(run: Run) -> LeaseLostError:
    return LeaseLostError(
        f"Task {run.key[0]} was taken from this run: its worker was silent for too long. It runs elsewhere or is in "
        "the dead set."
    )

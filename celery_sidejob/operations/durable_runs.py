"""A run of an ordinary durable task, as its process knows it, and whether the run still has its row.

The order is lock (`durable_locks.py`), body, result, then removal together with keeping the follow-ups
(`durable_ends.py`). `docs/durable.md` says what a death in each gap leads to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol

from ..model.durable import Content, Key, Message
from ..model.errors import LeaseLostError
from .runtime import Runtime


class Claim(Protocol):
    """The right to publish the body of a chord. The result backend gives it to one process at a time, for a while."""

    messages: Sequence[Message]
    """The chord's body, among the follow-ups of the run that holds the right."""

    def hold(self) -> bool | None:
        """Extend the right; False if another process has published the body instead.

        None while that is undecided: another process has the right now, or the result backend does not answer.
        """

    def settle(self) -> None:
        """Have the backend forget the chord, whose body is kept; never raises. If we die before, it expires."""


class Untold(Protocol):
    """A success of which the result backend has still to be told, or whose chord has no body yet."""

    is_told: bool
    """The result is stored, and the part of a chord is counted."""

    @property
    def is_part(self) -> bool:
        """Whether the run is a part of a chord."""

    def tell(self) -> bool:
        """Tell of it; False while the backend is away, or another process owes the chord's body. Never raises."""


@dataclass(eq=False, slots=True)
class Run:
    """A run of a durable task in this process, from its lock to its end."""

    key: Key
    task: str
    worker_id: int
    runtime: Runtime
    """The runtime of the store that has the row."""
    content: Content
    """The task and body that the run executes."""
    in_body: bool = False
    body_is_over: bool = False
    moved: bool = False
    """The row goes on as another message: a retry, or the task that replaces this one."""
    is_counted: bool = False
    """It is a part of a chord that Redis counts. Its entry stays in the dead set: its chord has failed by then."""
    is_lost: bool = False
    """The run does not count: its body was left and the row given back, or the row was taken from the run."""
    is_revoked: bool = False
    """The run was terminated, and its worker has buried it; its body, in a thread, goes on."""
    error: BaseException | None = None
    """The error that the body has raised, if that is the task's failure."""
    is_told: bool = False
    """The result backend was told of the outcome, or will be: it is told of no other."""
    untold: Untold | None = None
    """The success of which the end has to tell the backend first."""
    follows: list[Message] = field(default_factory=list)
    """Callbacks, the rest of a chain and the body of a chord, kept by the commit that removes this run's row."""
    claim: Claim | None = None
    """The right to hold until that commit, if the run publishes the body of a chord."""
    has_waited: bool = False
    """The end has waited for an unavailable store as long as an end may."""
    end_is_unknown: bool = False
    """An end whose answer was lost may have removed the row."""
    has_ended: bool = False
    """The end, which was given up once, was written later."""
    traceback: str | None = None
    slot_in: str | None = None
    """The managed queue in which the end of this run frees a slot."""
    pool: str | None = None
    """The capacity pool in which the end of this task frees a slot."""
    queue: str | None = None
    """The queue of its row; None until that is known."""
    waited_s: float | None = None
    """Seconds from the moment at which it was due to its beginning; None until that is known."""
    began_at: float = field(default_factory=time.monotonic)
    """By the monotonic clock."""
    is_held: bool = False
    """The worker holds its row since it has fetched the message."""
    held_at: datetime | None = None
    """The number of the hold: see `Held`. None where the end of the run has to free a slot."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the worker wants to stop, or has ended this run."""


_BODY: ContextVar[Run | Literal["inline"] | None] = ContextVar("celery_sidejob_durable", default=None)
"""The run whose body runs here; "inline" for a body without a run."""


@contextmanager
def in_body(run: Run | None) -> Iterator[None]:
    """Make the block the body of a run, also for threads that are given the context.

    None: the body of a task called as a function or eagerly, which has no row. Within the body of a run it belongs to
    that run.
    """
    token = _BODY.set(run or _BODY.get() or "inline")
    try:
        yield
    finally:
        _BODY.reset(token)


def current() -> Run | Literal["inline"] | None:
    """Return the run whose body runs here; "inline" in a body without a run, None outside of bodies."""
    return _BODY.get()


def is_to_stop() -> bool:
    """Tell whether the durable task whose body runs here should end soon; False outside of one."""
    run = _BODY.get()
    return isinstance(run, Run) and run.stopping()


def lease_lost(run: Run) -> LeaseLostError:
    return LeaseLostError(
        f"Task {run.key[0]} was taken from this run: its worker was silent for too long. It runs elsewhere or is in "
        "the dead set."
    )

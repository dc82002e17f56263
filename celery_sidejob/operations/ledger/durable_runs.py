"""A durable task's run, as its process knows it, and whether the run still has its row.

The order is lock (`durable_locks.py`), body, result, then removal together with keeping the follow-ups
(`durable_ends.py`). `docs/durable.md` explains the effect of a death in each gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol

from ...model import native
from ...model.durable import Content, Key, Message
from ...model.errors import LeaseLostError
from ...model.protocols import Rider
from ..runtime import Runtime


class Claim(Protocol):
    """The right to publish the body of a chord. The result backend gives it to one process at a time, for a while."""

    messages: Sequence[Message]
    """The chord's body, among the follow-ups of the run that holds the right."""

    def hold(self) -> bool | None:
        """Extend the right; False if another process has published the body instead.

        None while this is undecided: another process has the right now, or the result backend does not answer.
        """

    def settle(self) -> None:
        """Have the backend forget the chord, whose body is kept; never raises. If we die before, it expires."""


class Untold(Protocol):
    """A success that was not reported to the result backend yet, or whose chord has no body yet."""

    is_told: bool
    """Whether the result is stored, and the part of a chord is counted."""

    @property
    def is_part(self) -> bool:
        """Whether the run is a part of a chord."""

    def tell(self) -> bool:
        """Report it; False while the backend is unreachable, or another process owes the chord's body. Never raises."""


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
    """Whether the row goes on as another message: a retry, or a replacement of the task."""
    is_counted: bool = False
    """Whether it is a part of a chord that Redis counts. Its entry stays in the dead set: its chord has failed by then.
    """
    is_lost: bool = False
    """Whether the run does not count: its body was aborted and the row given back, or the row was taken from the run.
    """
    is_revoked: bool = False
    """Whether the run was terminated and buried by its worker; its body, in a thread, goes on."""
    error: BaseException | None = None
    """The error that the body has raised, if that is the task's failure."""
    is_told: bool = False
    """Whether the result backend has an outcome, or will get it: then it gets no other."""
    untold: Untold | None = None
    """The success that the end must report to the backend first."""
    follows: list[Message] = field(default_factory=list)
    """Callbacks, the rest of a chain and the body of a chord, which the commit that removes this run's row keeps."""
    riders: list[Rider] = field(default_factory=list)
    """The result and the chord's part that the commit of the end writes, if the result backend is the store."""
    claim: Claim | None = None
    """The right to hold until that commit, if the run publishes the body of a chord."""
    has_waited: bool = False
    """Whether the end has waited for an unavailable store as long as an end may."""
    end_is_unknown: bool = False
    """Whether an end whose answer was lost may have removed the row."""
    has_ended: bool = False
    """Whether the end was written later, after it had been given up once."""
    traceback: str | None = None
    slot_in: str | None = None
    """The managed queue in which the end of this run frees a slot."""
    pool: str | None = None
    """The capacity pool in which the end of this task frees a slot."""
    queue: str | None = None
    """The queue of its row; None until it is known."""
    waited_s: float | None = None
    """Seconds from the moment it was due to its beginning; None until they are known."""
    began_at: float = field(default_factory=time.monotonic)
    """When it began, by the monotonic clock."""
    is_held: bool = False
    """Whether the worker has held its row since it fetched the message."""
    held_at: datetime | None = None
    """The number of the hold: see `Held`. None if the end of the run must free a slot."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the worker wants to stop, or has ended this run."""


_BODY: ContextVar[Run | Literal["inline"] | None] = ContextVar("celery_sidejob_durable", default=None)
"""The run whose body runs here; "inline" for a body without a run."""


def in_body(run: Run | None) -> AbstractContextManager[None]:
    """Make the block the body of a run, also in threads that run in this context.

    None: the body of a task that is called as a function or eagerly, which has no row. Inside the body of a run, such a
    body belongs to that run.
    """
    return native.within(_BODY, run or _BODY.get() or "inline")


def current() -> Run | Literal["inline"] | None:
    """Return the run whose body runs here; "inline" in a body without a run, None outside of bodies."""
    return _BODY.get()


def is_to_stop() -> bool:
    """Tell whether the durable task whose body runs here should end soon; False outside of a body."""
    run = _BODY.get()
    return isinstance(run, Run) and run.stopping()


def lease_lost(run: Run) -> LeaseLostError:
    return LeaseLostError(
        f"Task {run.key[0]} was taken from this run: its worker was silent for too long. It runs elsewhere or is in "
        "the dead set."
    )

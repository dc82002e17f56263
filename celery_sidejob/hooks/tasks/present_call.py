"""The call being made: facts for which Celery's code, between a task's call and its message, has no parameter.

It belongs to a thread or greenlet, and to what that calls meanwhile: a receiver of `before_task_publish` that calls
another task does so within the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery.app.task import Context

from ...model.capacity import Admission
from ...model.durable import Message
from ...model.unique import Unique
from ...operations.durable_runs import Claim
from ...operations.runtime import Runtime


class Made(NamedTuple):
    """A message that Celery has made, and what it was made of."""

    message: Message
    body: Any
    """Arguments, keyword arguments, and what follows the task."""
    serializer: Any
    compression: Any


@dataclass(slots=True)
class Noted:
    """Where the message that Celery makes is noted, for others to be made after it."""

    made: Made | None = None


@dataclass
class Together:
    """Messages of one call that are kept together, and what is done once they are."""

    messages: list[Message] = field(default_factory=list)
    without_rows: list[Callable[[], Any]] = field(default_factory=list)
    """How each is sent where the store is away and `sidejob_on_store_down` says so."""
    events: list[Callable[[], Any]] = field(default_factory=list)
    subscriptions: list[Callable[[], Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Counting:
    """A part of a chord that is being counted."""

    runtime: Runtime
    request: Context
    kept_later: list[Message]
    """Messages to be kept once it was counted; the body is added to them meanwhile."""
    claim: Claim | None = None
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = len(self.kept_later)

    @property
    def body(self) -> list[Message]:
        """The body, as it is to be kept; empty where it is not durable, or could not be made."""
        return self.kept_later[self.first :]


class Call(NamedTuple):
    """The call being made; each is None where there is none."""

    transaction: Any = None
    """The transaction of a chord whose tasks are called."""
    together: Together | None = None
    """Where messages are only collected: whoever asks for that keeps them."""
    noted: Noted | None = None
    subscriptions: list[Callable[[], Any]] | None = None
    """Subscriptions to results, which the result backend is asked for once the messages are kept."""
    counting: Counting | None = None
    unique: Unique | None = None
    """The key that the message is to have."""
    replaces: str | None = None
    """The task whose message gives way to it."""
    admission: Admission | None = None
    """How the message gets slots of a capacity pool."""
    follows: bool = False
    """Whether Celery makes the call for another, so that it is not refused."""


PLAIN = Call()
"""A call of which nothing is to be known here."""
_call: ContextVar[Call] = ContextVar("celery_sidejob_call", default=PLAIN)

present_call = _call.get


@contextmanager
def calling(**changes: Any) -> Iterator[None]:
    """Make the calls of the block with these facts; facts that are not given are those around the block."""
    token = _call.set(_call.get()._replace(**changes))
    try:
        yield
    finally:
        _call.reset(token)

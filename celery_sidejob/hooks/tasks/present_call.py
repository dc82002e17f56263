"""The call being made: facts for which Celery's code, between a task's call and its message, has no parameter.

It belongs to a thread or greenlet and to all code that it calls meanwhile: a receiver of `before_task_publish` that
calls another task does so within the first call.
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
from ...operations.ledger.durable_runs import Claim
from ...operations.runtime import Runtime


class Made(NamedTuple):
    """A message that Celery has made, and its ingredients."""

    message: Message
    body: Any
    """Arguments, keyword arguments, and the task's follow-ups."""
    serializer: Any
    compression: Any


@dataclass(slots=True)
class Noted:
    """Notes Celery's message, as a model for others."""

    made: Made | None = None


@dataclass
class Together:
    """Messages of one call that are kept together, and the work that follows."""

    messages: list[Message] = field(default_factory=list)
    without_rows: list[Callable[[], Any]] = field(default_factory=list)
    """Functions that send the messages if the store is unreachable and `sidejob_on_store_down` allows it."""
    events: list[Callable[[], Any]] = field(default_factory=list)
    subscriptions: list[Callable[[], Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Counting:
    """A part of a chord while it is being counted."""

    runtime: Runtime
    request: Context
    kept_later: list[Message]
    """Messages to keep after the count; the body is added to them meanwhile."""
    claim: Claim | None = None
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = len(self.kept_later)

    @property
    def body(self) -> list[Message]:
        """The body, in the form in which it is kept; empty if it is not durable, or could not be made."""
        return self.kept_later[self.first :]


class Call(NamedTuple):
    """Facts about the call being made; each is None if there is none."""

    transaction: Any = None
    """The transaction of a chord that calls its tasks."""
    together: Together | None = None
    """Collects the messages, if the caller keeps them itself."""
    noted: Noted | None = None
    subscriptions: list[Callable[[], Any]] | None = None
    """Subscriptions to results, for which the result backend is asked once the messages are kept."""
    counting: Counting | None = None
    unique: Unique | None = None
    """The unique key of the message."""
    replaces: str | None = None
    """The task whose message gives way to this one."""
    admission: Admission | None = None
    """How the message gets slots of a capacity pool."""
    follows: bool = False
    """Whether the call follows another call, made by Celery, so that it is not refused."""


PLAIN = Call()
"""A call without such facts."""
_call: ContextVar[Call] = ContextVar("celery_sidejob_call", default=PLAIN)

present_call = _call.get


@contextmanager
def calling(**changes: Any) -> Iterator[None]:
    """Make the calls of the block with these facts; other facts are inherited from the surrounding block."""
    token = _call.set(_call.get()._replace(**changes))
    try:
        yield
    finally:
        _call.reset(token)

"""The call being made: what Celery's own code, between a task's call and its message, cannot be told otherwise.

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

from ...model.durable import Message
from ...operations.durable_runs import Claim
from ...operations.runtime import Runtime


@dataclass
class Together:
    """Messages of one call that are kept together, and what is done once they are."""

    messages: list[Message] = field(default_factory=list)
    without_rows: list[Callable[[], Any]] = field(default_factory=list)
    """How each is sent where the store is away and `sidejob_on_store_down` says so."""
    events: list[Callable[[], Any]] = field(default_factory=list)
    wanted: list[Callable[[], Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Counting:
    """A part of a chord that is being counted."""

    runtime: Runtime
    request: Context
    kept_later: list[Message]
    """What is to be kept once it was counted; the body is what comes to it meanwhile."""
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
    """That of a chord whose tasks are called."""
    together: Together | None = None
    """Where messages are only collected: whoever asks for that keeps them."""
    wanted: list[Callable[[], Any]] | None = None
    """What the result backend is to do for the caller of a durable task, once that is kept."""
    counting: Counting | None = None


_PLAIN = Call()
_call: ContextVar[Call] = ContextVar("celery_sidejob_call", default=_PLAIN)

present_call = _call.get


@contextmanager
def calling(**changes: Any) -> Iterator[None]:
    """Have the calls of the block made so; what is not given is as it is around the block."""
    token = _call.set(_call.get()._replace(**changes))
    try:
        yield
    finally:
        _call.reset(token)

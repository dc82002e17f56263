"""What is present in this thread: the call being made, and the runs of durable tasks in this process.

Celery's code, between a task's call and its message, has no parameter for the facts of a call. They belong to a thread
or greenlet and to all code that it calls meanwhile: a receiver of `before_task_publish` that calls another task does so
within the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery import Celery
from celery.app.task import Context

from ...model import native
from ...model.capacity import Admission
from ...model.durable import Message
from ...model.unique import Unique
from ...operations.ledger.durable_runs import Claim, Run
from ...operations.runtime import Runtime


class Made(NamedTuple):
    """A message that Celery has made, and its ingredients."""

    message: Message
    body: Any
    """Arguments, keyword arguments, and the task's follow-ups."""
    serializer: Any
    compression: Any


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
    first: int
    """How many there were before."""
    claim: Claim | None = None

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
    noted: list[Made] | None = None
    """Collects Celery's messages too, as models for others."""
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


def making(call: Call) -> AbstractContextManager[None]:
    """Make the calls of the block with these facts."""
    return native.within(_call, call)


def calling(**changes: Any) -> AbstractContextManager[None]:
    """Make the calls of the block with these facts; other facts are inherited from the surrounding block."""
    return making(present_call()._replace(**changes))


def is_lending() -> bool:
    """Tell whether a chord with a transaction makes this call, or a group with a follow-up.

    Celery copies the options of such a call for the chord's body, and a transaction cannot be copied. So Celery does
    not get it, and the messages of the call take it from here; the body is a part of these messages.
    """
    return present_call().transaction is not None


@contextmanager
def handed_over(options: dict[str, Any]) -> Iterator[None]:
    """Put the chord's transaction into the options of a call; calls within the block do not have it."""
    options.setdefault("transaction", present_call().transaction)
    with calling(transaction=None):
        yield


RUNS: dict[str, Run] = {}
"""The runs by task id."""


def run_of(task: Any) -> Run | None:
    """Return the run of the task's present request, if it has begun one."""
    return run_of_request(getattr(task, "request", None))


def run_of_request(request: Context | None) -> Run | None:
    """Return the run of a request, even after Celery has left it; a header may have the same name."""
    found = getattr(request, "sidejob_run", None)
    return found if isinstance(found, Run) else None


def present_run(app: Celery) -> Run | None:
    """Return the run of the durable task whose body, or whose end, this thread executes."""
    return run_of(app.current_worker_task)

"""The protocols by which operations reach the broker, the result backend, observers and tasks; `hooks` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from .broker_view import Look
from .buried import Buried, Place
from .call import Call
from .durable import Key, Message
from .events import Event
from .messages import Continuation, Doorbell, Outcome
from .port import PortOptions

Publication = Doorbell | Continuation | Message
Refused = list[tuple[Publication, BaseException]]
"""Messages that no queue will ever take, each with the reason."""


class Publisher(Protocol):
    """Gives messages to the broker."""

    def publish(
        self, messages: Sequence[Publication], *, ready: Any = None, refused: Refused | None = None
    ) -> Sequence[Publication]:
        """Publish as many as possible, in order, within a bounded time, and return those the broker was given.

        Of messages of ordinary tasks `confirm` tells whether it has them. Raises nothing for a broker that is down:
        what is not returned is published by the sweeper. `ready` is what `make_ready` has made of them. What no queue
        will ever take is added to `refused`.
        """
        ...

    def check_sendable(self, what: str, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        """Raise InvalidValueError for headers and properties of a message that the broker cannot carry."""
        ...

    def make_ready(self, messages: Sequence[Message]) -> Any:
        """Make what is to be sent of messages, and send none; None where `publish` is to do all of it."""
        ...

    def confirm(self, published: Sequence[Key]) -> Sequence[Key]:
        """Wait for what the broker still owes an answer to, and return which of these messages it has."""
        ...

    def close(self) -> None:
        """Let go of the connection; the next publish opens another."""
        ...


class Broker(Protocol):
    """Answers questions about the broker. Never raises for a broker that is down."""

    @property
    def ready(self) -> bool:
        """Whether this process would try the broker now; False during the pause after a failure."""
        ...

    @property
    def knows_queues(self) -> bool:
        """Whether the broker can be asked for its queues: `ready_messages`."""
        ...

    def ready_messages(self, queue: str) -> int | None:
        """Count the messages of a queue that no worker has fetched, GONE without the queue; None if that is not known.

        What a worker has fetched is not counted, and copies are.
        """
        ...

    def look(self) -> Look | None:
        """Begin a look for single messages in the broker; None where it shows none."""
        ...

    def dead_list(self) -> int | None:
        """Count what the broker's transport has given up; None where it has no such list, or does not answer."""
        ...

    def buried(self, place: Place) -> tuple[Place, Sequence[Buried]]:
        """Read a page, behind a place, of what the broker's transport has given up; nothing where it has no such list.

        Returns that place as well: the beginning, where something before it was taken out.
        """
        ...

    def forget_buried(self, texts: Sequence[bytes]) -> bool:
        """Take some of it out of that list; False if the broker does not answer, and it is all to be read again."""
        ...

    def was_emptied(self, store: str | None = None) -> bool:
        """Tell whether the broker has lost what it had since this was last asked, where that can be known.

        It is told once for each store (None is the primary), whose rows are then published again.
        """
        ...


class Results(Protocol):
    """Brings outcomes to the result backend and to what follows an asking."""

    def wanted(self, task: str, options: Mapping[str, Any] | None) -> bool:
        """Tell whether anything is to be sent when this asking ends."""
        ...

    def continuations(self, outcome: Outcome) -> Sequence[Continuation]:
        """Return the publications that follow, each with a task id of its own from now on. No network."""
        ...

    def deliver(self, outcome: Outcome) -> bool:
        """Store the result, count a chord's part, call errbacks; False if the backend could not be reached."""
        ...

    def show(self, outcome: Outcome) -> bool:
        """Only show how an asking stands, with no effect beyond that; False if nothing was stored. Never raises."""
        ...

    def module_of(self, error: str) -> str:
        """Return where the class of an error is by which a run ends that did not raise one, by the class's name."""
        ...

    def fail_continuation(self, continuation: Continuation, error: str) -> None:
        """Store FAILURE for what followed an asking and will not be sent. Never raises."""
        ...

    def tell_of_doom(self, message: Message, reason: str, error: str, *, place: int) -> str:
        """Store that an ordinary durable task was lost, has expired or was revoked, with errbacks and the chord's part.

        `place`: of the store that has its row, among all stores.
        Returns what to do with its row: ``bury`` it, ``remove`` it (it had ended well after all, and nothing follows
        it), or ``wait`` for a backend that could not be reached.
        """
        ...

    def announce_revoked(self, message: Message) -> None:
        """Tell monitors and receivers, as Celery does, that a task was revoked before it ran. Never raises."""
        ...


class Observer(Protocol):
    """Is told what happened, after its commit."""

    def tell(self, event: Event) -> None:
        """Make an event known. Never raises."""
        ...


class Tasks(Protocol):
    """Knows the app's tasks."""

    def call(
        self,
        task: Any,
        args: Any,
        kwargs: Mapping[str, Any] | None,
        *,
        queue: str | None,
        priority: int | None,
        options: Mapping[str, Any],
    ) -> Call:
        """Resolve a task, a name or a signature, and check the arguments against the task's own parameters."""
        ...

    def ports(self, task: str) -> tuple[Mapping[str, PortOptions], Mapping[str, PortOptions]]:
        """Return the input and output ports that a task declares."""
        ...

    def served(self) -> list[dict[str, str]]:
        """Return what this process serves: {task, queue, options as JSON text}, for clients without the code."""
        ...

    def delivered_from(self, delivery_info: Mapping[str, Any]) -> str | None:
        """Return the queue that a message came from, if where it was sent tells one that we know."""
        ...

    def localize(self, eta: datetime) -> datetime:
        """Return `eta` with a time zone: the app's, where it has none."""
        ...

    def result(self, task_id: str) -> Any:
        """Return Celery's handle for the result of an asking."""
        ...

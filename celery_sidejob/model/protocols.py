"""The protocols of the broker, result backend, observers and tasks that operations use; `hooks` implements them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, Protocol

from .broker_view import Buried, Cursor, Look
from .call import Call
from .capacity import Admission
from .durable import Message
from .events import Event
from .messages import Continuation, Doorbell, Outcome
from .port import PortOptions

Publication = Doorbell | Continuation | Message
Refused = list[tuple[Publication, BaseException]]
"""Messages that no queue will ever take, each with the reason."""


class Publisher(Protocol):
    """Gives messages to the broker."""

    def publish(self, messages: Sequence[Publication], *, refused: Refused | None = None) -> Sequence[Publication]:
        """Publish as many messages as possible, in order, within a bounded time; return those that the broker has.

        Raises nothing if the broker is down: the sweeper publishes the messages that are not returned. Messages that no
        queue will ever take are added to `refused`.
        """

    def ring(self, messages: Sequence[Doorbell | Message]) -> None:
        """Wake the workers for messages that are in the broker already: it is the store, and has their references.

        Raises nothing; a worker that is not woken finds them within a second.
        """

    def ring_queues(self, queues: Sequence[str]) -> None:
        """Wake the workers of these queues of the broker that is the store; raises nothing."""

    def to_own_queue(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return those messages that go to their own queue, with their `priority`.

        An exchange leads the others, or they cannot be read here, which `publish` tells.
        """

    def check_sendable(self, what: str, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        """Raise InvalidValueError for headers and properties of a message that the broker cannot carry."""

    def close(self) -> None:
        """Close the connection; the next publish opens another."""


class Broker(Protocol):
    """Answers questions about the broker. Never raises for a broker that is down."""

    @property
    def identity(self) -> str:
        """What tells this broker from others; the schema's owner is an app and a broker."""

    @property
    def ready(self) -> bool:
        """Whether this process would try the broker now; False during the pause after a failure."""

    @property
    def knows_queues(self) -> bool:
        """Whether the broker can be asked for its queues: `ready_messages`."""

    def ready_messages(self, queue: str) -> int | None:
        """Count the messages of a queue that no worker has fetched; GONE if there is no such queue, None if unknown.

        Fetched messages are not counted; copies are.
        """

    def look(self) -> Look | None:
        """Begin a look for single messages in the broker; None if the broker does not show any."""

    def dead_list(self) -> int | None:
        """Count the messages that the transport has given up; None without such a list or the broker's answer."""

    def buried(self, cursor: Cursor) -> tuple[Cursor, Sequence[Buried]]:
        """Read a page, after a cursor, of the messages that the transport has given up; nothing without such a list.

        Also returns the cursor: the list's beginning, if an earlier entry was removed.
        """

    def forget_buried(self, texts: Sequence[bytes]) -> bool:
        """Remove entries from that list; False if the broker does not answer, and the whole list must be read again."""

    def was_emptied(self, store: str | None = None) -> bool:
        """Tell whether the broker has lost its messages since the last call, if that can be known.

        It is told once for each store (None is the primary), whose rows are then published again.
        """


class ResultRules(Protocol):
    """Knows what follows an asking's end. Rows are locked when it is asked: it waits for no network."""

    def wanted(self, task: str, options: Mapping[str, Any] | None) -> bool:
        """Tell whether a message or a result must be sent when this asking ends."""

    def continuations(self, outcome: Outcome) -> Sequence[Continuation]:
        """Return the publications that follow, each with its own task id from now on; see `Results.connect`."""

    def module_of(self, error: str) -> str:
        """Return the module of an error class, by the class's name, for runs that end without raising it."""


class Results(ResultRules, Protocol):
    """Brings outcomes to the result backend and to the continuations of an asking. May wait for both."""

    def connect(self) -> None:
        """Make this thread's result backend, which may connect: `continuations` would make it."""

    def deliver(self, outcome: Outcome) -> bool:
        """Store the result, count a chord's part, call errbacks; False if the backend could not be reached."""

    def show(self, outcome: Outcome) -> bool:
        """Show an asking's state in the backend, without further effect; False if nothing was stored. Never raises."""

    def fail_continuation(self, continuation: Continuation, error: str) -> None:
        """Store FAILURE for a continuation that will not be sent. Never raises."""

    def tell_of_doom(self, message: Message, reason: str, error: str, *, place: int) -> str:
        """Store that an ordinary durable task was lost, has expired or was revoked; with errbacks and the chord's part.

        `place`: the position among all stores of the one that has its row. Returns what to do with its row: ``bury``
        it, ``remove`` it (the task had ended well after all, and nothing follows it), or ``wait`` for a backend that
        could not be reached.
        """

    def announce_revoked(self, message: Message) -> None:
        """Tell monitors and receivers, as Celery does, that a task was revoked before it ran. Never raises."""


class Observer(Protocol):
    """Is told of events, after their commits."""

    def tell(self, event: Event) -> None:
        """Make an event known. Never raises."""

    @property
    def is_heard(self) -> bool:
        """Whether a receiver in this process is sent the signal of jobs that move."""


class Announcer(Protocol):
    """Tells those who listen at the moment what has been committed. Nothing is kept for anybody else."""

    def may_be_heard(self, channel: str, *, ask: bool = True) -> bool:
        """Tell whether somebody may be listening to a channel; without `ask` the store is not asked. Never raises."""

    def announce(self, channel: str, text: str, wanted: Callable[[], bool] = ...) -> None:
        """Announce a message, as JSON text, to those who listen to exactly this channel; never raises, never waits.

        If somebody listens, another thread asks `wanted` whether the message is to be announced.
        """

    def listen(self, channels: Sequence[str]) -> Any:
        """Subscribe to channels over a connection of the caller's own; StoreUnavailableError without an answer."""

    def close(self) -> None:
        """Send what is left, within a bounded time, and close the connection; the next use opens another."""


class Tasks(Protocol):
    """Knows the app's tasks."""

    models: dict[str, Any]
    """By a task's name, what the jobs of its single calls are drawn up after (`jobs/drafts.py`)."""

    def publishes_status(self, task: str) -> bool:
        """Tell whether the status changes of a task's jobs are announced: its option `publish_status`."""

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

    def naming(self, task: str) -> Callable[[Any, Any], str | None] | None:
        """Return what checks the arguments of further calls of a task, and gives each a task id.

        None where something looks at single calls, so that each is to be resolved by itself; what is returned gives
        None if something does so by then.
        """

    def admission(self, task: str, queue: str) -> Admission | None:
        """Return how a job of a task waits for slots in a queue, if its call names no pool; None without a pool."""

    def ports(self, task: str) -> tuple[Mapping[str, PortOptions], Mapping[str, PortOptions]]:
        """Return the input and output ports that a task declares."""

    def served(self) -> list[dict[str, str]]:
        """Return what this process serves: {task, queue, options as JSON text}, for clients without the code."""

    def delivered_from(self, delivery_info: Mapping[str, Any]) -> str | None:
        """Return the queue that a message came from, if its routing data names one that we know."""

    def localize(self, eta: datetime) -> datetime:
        """Return `eta` with a time zone: the app's, if it has none."""

    def result(self, task_id: str) -> Any:
        """Return Celery's handle for the result of an asking."""

    def overloaded(self, pool: str, *, limit: int, used: int, retry_after: float) -> Exception:
        """Return the error of a call that a full capacity pool refuses: ours and kombu's at once."""

    def apply_async(self, task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Call a task, a name or a signature of one task as Celery does; returns its result."""

    def kind(self, task: str) -> Literal["job", "message"]:
        """Tell what a call of a task makes: a job, or a message that is kept. Raises for what makes neither."""

    def check_message(self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any) -> None:
        """Refuse a call of a durable task as Celery, or we, would refuse it."""

    def messages(
        self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Callable[[], None]]:
        """Make messages of a durable task, one for each of these options, and what tells of them once they are kept."""

    @property
    def timezone(self) -> str | None:
        """The name of the app's time zone; None for the host's own, which has none."""

    @property
    def in_task(self) -> bool:
        """Whether this thread is in a task of a worker."""

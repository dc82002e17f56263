"""The protocols of the broker, result backend, observers and tasks that operations use; `hooks` implements them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from .capacity import Admission
from .durable import Message
from .events import Event
from .messages import Buried, Continuation, Cursor, Doorbell, Outcome
from .port import PortOptions
from .unique import Unique

Publication = Doorbell | Continuation | Message
Refused = list[tuple[Publication, BaseException]]
"""Messages that no queue will ever take, each with the reason."""


class Publisher(Protocol):
    """Gives messages to the broker."""

    def publish(self, messages: Sequence[Publication], *, refused: Refused | None = None) -> Sequence[Publication]:
        """Publish as many messages as possible, in order, within a bounded time; return those that the broker took.

        Raises nothing if the broker is down: the sweeper publishes the messages that are not returned. Messages that no
        queue will ever take are added to `refused`.
        """

    def ring(self, messages: Sequence[Doorbell | Message]) -> None:
        """Wake the workers for messages that are already in the broker, because the broker is the store.

        Raises nothing; a worker that is not woken finds them within a second.
        """

    def ring_queues(self, queues: Sequence[str]) -> None:
        """Wake the workers of these queues of the broker that is the store; raises nothing."""

    def to_own_queue(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages that go to their own queue, with their `priority`.

        The others are routed by an exchange, or cannot be read here; `publish` reports the latter.
        """

    def check_sendable(self, what: str, headers: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        """Raise InvalidValueError if the broker cannot carry these headers and properties of a message."""

    def close(self) -> None:
        """Close the connection; the next publish opens another."""


class Broker(Protocol):
    """Reads the broker's state. Never raises for a broker that is down."""

    @property
    def identity(self) -> str:
        """The text that distinguishes this broker from others; the schema's owner is an app and a broker."""

    @property
    def ready(self) -> bool:
        """Whether this process would try the broker now; False during the pause after a failure."""

    @property
    def knows_queues(self) -> bool:
        """Whether queues of the broker can vanish, and `ready_messages` reports it."""

    def ready_messages(self, queue: str) -> int | None:
        """Count the messages of a queue that no worker has fetched; GONE if there is no such queue, None if unknown.

        Fetched messages are not counted; copies are.
        """

    def dead_list(self) -> int | None:
        """Count the messages that the transport has given up; None if it has no such list or does not answer."""

    def buried(self, cursor: Cursor) -> tuple[Cursor, Sequence[Buried]]:
        """Read a page, after a cursor, of the messages that the transport has given up; empty if it has no such list.

        Also returns the cursor: the list's beginning, if an earlier entry was removed.
        """

    def forget_buried(self, texts: Sequence[bytes]) -> bool:
        """Remove entries from that list; False if the broker does not answer, and the whole list must be read again."""

    def was_emptied(self, store: str | None = None) -> bool:
        """Tell whether the broker is known to have lost its messages since the last call.

        The result is true once for each store (None is the primary), whose rows are then published again.
        """


class Rider(Protocol):
    """A write that the commit of a run's end makes too: the result, and the count of a chord's part."""

    @property
    def alone(self) -> Any | None:
        """The result in the form in which the statement of the end keeps it; None if there is more to write."""

    def kept(self, *, is_listened: bool) -> None:
        """Note that the statement of the end has kept the result, and whether a process listens for it."""

    def write(self, executor: Any) -> None:
        """Write it in the transaction of the end, and again if that transaction is repeated."""

    def committed(self) -> None:
        """Do the work that follows the commit; never raises."""


class ResultRules(Protocol):
    """Decides what follows the end of an asking. Rows are locked when it is called, so it waits for no network."""

    @property
    def in_store(self) -> bool:
        """Whether the result backend is the app's store."""

    def wanted(self, task: str, options: Mapping[str, Any] | None) -> bool:
        """Tell whether a message or a result must be sent when this asking ends."""

    def continuations(self, outcome: Outcome) -> Sequence[Continuation]:
        """Return the publications that follow, each with its own task id from then on; see `Results.connect`."""

    def riders(self, outcome: Outcome) -> Sequence[Rider]:
        """Return the writes of the result and of a chord's part, for the commit that ends the asking.

        Empty if the result backend is elsewhere. Raises an error if the backend refuses the result.
        """

    def forget(self, executor: Any, task_ids: Sequence[str], *, place: int) -> None:
        """Remove the results of durable tasks in the transaction that has them run again.

        Only if the result backend is the store at this position: results elsewhere stay until others come.
        """

    def module_of(self, error: str) -> str:
        """Return the module of an error class, given the class's name, for runs that end without raising it."""


class Results(ResultRules, Protocol):
    """Delivers outcomes to the result backend and to the continuations of an asking. May wait for both."""

    def connect(self) -> None:
        """Make this thread's result backend now, which may connect; otherwise `continuations` would do so."""

    def deliver(self, outcome: Outcome) -> bool:
        """Store the result, count a chord's part, call errbacks; False if the backend could not be reached."""

    def show(self, outcome: Outcome) -> bool:
        """Show an asking's state in the backend, without further effect; False if nothing was stored. Never raises."""

    def fail_continuation(self, continuation: Continuation, error: str) -> None:
        """Store FAILURE for a continuation that will not be sent. Never raises."""

    def send_late_bodies(self) -> None:
        """Send the bodies of chords whose last process has died, if the result backend is the store."""

    def tell_of_doom(
        self, message: Message, reason: str, error: str, *, place: int, failure: BaseException | None = None
    ) -> tuple[Literal["bury", "remove", "wait"], Sequence[Rider]]:
        """Store that a durable task was lost, has expired or was revoked; call errbacks, and count it for its chord.

        `place`: the position, among the app's stores, of the store that has its row. `failure`: the error to be stored;
        without it one is made of the text. Returns what to do with the row: ``bury`` it, ``remove`` it (the task had
        ended well after all, and nothing follows it), or ``wait`` for a backend that could not be reached; and what the
        commit of a burial must write.
        """

    def announce_revoked(self, message: Message) -> None:
        """Tell monitors and receivers, as Celery does, that a task was revoked before it ran. Never raises."""


class Observer(Protocol):
    """Receives events after their commits."""

    def tell(self, event: Event) -> None:
        """Make an event known. Never raises."""

    @property
    def is_heard(self) -> bool:
        """Whether a receiver in this process is sent the signal of jobs that move."""


class Announcer(Protocol):
    """Tells the present listeners what has been committed. Nothing is kept for later listeners."""

    def may_be_heard(self, channel: str, *, ask: bool = True) -> bool:
        """Tell whether a channel may have a listener; without `ask` the store is not asked. Never raises."""

    def announce(self, channel: str, text: str, wanted: Callable[[], bool] = ...) -> None:
        """Announce a message, as JSON text, to the listeners of exactly this channel; never raises, never waits.

        If there are listeners, another thread asks `wanted` whether to announce the message.
        """

    def listen(self, channels: Sequence[str]) -> Any:
        """Subscribe to channels over a connection of the caller's own; StoreUnavailableError without an answer."""

    def close(self) -> None:
        """Send the waiting announcements, within a bounded time, and close the connection until the next use."""


class Tasks(Protocol):
    """Knows the app's tasks."""

    models: dict[str, Any]
    """Drafts of jobs by the name of their task, which further single calls copy (`jobs/drafts.py`)."""

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
        """Resolve a task, its name or a signature, and check the arguments against the task's own parameters."""

    def naming(self, task: str) -> Callable[[Any, Any], str | None] | None:
        """Return the function that checks the arguments of further calls of a task and gives each a task id.

        Return None if each call must be resolved by itself, because something depends on single calls. The function
        returns None if that has become so since.
        """

    def admission(self, task: str, queue: str) -> Admission | None:
        """Return how a job of a task gets slots in a queue, if its call names no pool; None without a pool."""

    def ports(self, task: str) -> tuple[Mapping[str, PortOptions], Mapping[str, PortOptions]]:
        """Return the input and output ports that a task declares."""

    def served(self) -> list[dict[str, str]]:
        """Return the tasks that this process serves, {task, queue, options as JSON text}, for clients without code."""

    def delivered_from(self, delivery_info: Mapping[str, Any]) -> str | None:
        """Return the queue that a message came from, if its routing data names a queue that we know."""

    def finished(self, value: Any, what: str) -> Any:
        """Return what the user's function `what` has returned, or what its coroutine returns in the end.

        Raises InvalidValueError for a generator, of which nothing has run.
        """

    def localize(self, eta: datetime) -> datetime:
        """Return `eta` with a time zone: the app's, if it has none."""

    def result(self, task_id: str) -> Any:
        """Return Celery's handle for the result of an asking."""

    def overloaded(self, pool: str, *, limit: int, used: int, retry_after: float) -> Exception:
        """Return the error of a call that a full capacity pool refuses: ours and kombu's at once."""

    def apply_async(self, task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Call a task, its name or a signature of one task as Celery does; returns its result."""

    def kind(self, task: str) -> Literal["job", "message"]:
        """Tell what a call of a task makes: a job, or a message that is kept. Raises for any other task."""

    def check_message(self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any) -> None:
        """Refuse a call of a durable task that Celery, or this package, would refuse."""

    def messages(
        self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Callable[[], None]]:
        """Make messages of a durable task, one for each of these options, and a function that reports them."""

    @property
    def timezone(self) -> str | None:
        """The name of the app's time zone; None for the host's own, which has no name."""

    @property
    def in_task(self) -> bool:
        """Whether this thread is in a task of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A task with everything that a new job of it needs."""

    task: str
    queue: str
    priority: int | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    columns: Mapping[str, Any]
    """The values of further columns, by name, that the task's own options give to its jobs."""
    inports: Mapping[str, PortOptions]
    outports: Mapping[str, PortOptions]
    task_id: str
    eta: datetime | None
    countdown: float | None
    unique: Unique | None = None
    admission: Admission | None = None
    options: Mapping[str, Any]
    """The Celery options of its first asking (link, chain, headers, …), as JSON values."""

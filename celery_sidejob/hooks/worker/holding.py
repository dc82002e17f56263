"""Claims the runs of jobs, and holds the rows of durable tasks, before their messages wait for the pool.

What has arrived in one round of the event loop is one page, or in more rounds while the pool has enough to do. The
statement that holds it runs beside the event loop: a slow store keeps no other task from running. It also writes the
ends of runs (`services/heartbeat/run_ends.py`). A message whose row is not held goes on all the same, and its process
locks the row, or finds that it is a copy. Where the store is the broker, durable tasks are held with their fetch
(`WorkerOutbox`).

A bell wakes the event loop for what is held, from any thread.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from celery import Celery
from celery.worker import state

from ...model import native
from ...model.crash_points import reach
from ...model.durable import Held, HeldRun, Message
from ...model.errors import InvalidValueError
from ...model.logger import logger
from ...model.messages import Doorbell
from ...model.native import Pipe
from ...operations.ledger import durable_runs
from ...operations.runs.run_pages import Claimed, RunKey
from ...services.heartbeat.deliveries import GRACE_S
from ...services.heartbeat.run_ends import Page
from ...services.loop import Loop
from ...store.broker.holds import NOBODY, Holder
from ...store.claims import Owed
from ...store.outbox.holds import Fresh
from ...transport.decoding import Payload
from ...transport.postgres import acknowledgements
from ..messages import doorbell, kept_message
from ..messages.carried import NewerFormatError
from ..task_options import REQUEUE, is_durable, lost_policy
from .delivered import Delivered, is_busy

PAGE = 64
"""Messages whose rows one statement holds at most."""
SOON_S = 0.005
"""How long a message waits for others, while the pool has enough to go on with."""
REST_S = 1.0


class Holding:
    """Holds the rows of one worker's messages, in a thread of its own."""

    name = "holding"

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._connection = 0
        self._is_on = False
        self._hub: Any = None
        self._loop: Loop | None = None
        self._asked: deque[tuple[int, Delivered, Callable[[Any], Any]]] = deque()
        self._answered: deque[tuple[int, Delivered, Callable[[Any], Any]]] = deque()
        self._under_way = 0
        self._due_at = 0.0
        self._is_rung = False
        self._wakes = native.Bell()
        self._bell = Bell()

    # -- in the event loop -------------------------------------------------------------------------------------------

    def register(self, hub: Any) -> None:
        """Have this event loop hand over what is held; without a loop nothing is held here."""
        self._bell.register(hub, self._hand_over)
        hub.on_tick.add(self._see)  # all that arrives in one round of the event loop is one page
        self._hub = hub
        self._is_on = True
        if self._loop is None:
            self._loop = Loop(self)
            self._loop.start()

    def hand_over(self, process: Callable[[Any], Any], request: Any) -> None:
        """Hand a request to the pool once its row is held, or at once if it is not to be.

        Only what has a row itself keeps its place behind those: nothing else waits for the store.
        """
        keeps_place = self._under_way and isinstance(request, Delivered)
        if not self._is_on or (_fresh(request) is None and not keeps_place):
            process(request)
            return
        self._under_way += 1
        if not self._asked:
            self._due_at = monotonic() + SOON_S
            self._hub.call_later(SOON_S, self._see)
        self._asked.append((self._connection, request, process))

    def _see(self) -> None:
        """Have what has arrived held, unless the pool has enough to go on with: then more comes into the page."""
        if self._asked and not self._is_rung and (not self._has_enough or monotonic() >= self._due_at):
            self._is_rung = True
            self._wakes.ring()

    @property
    def _has_enough(self) -> bool:
        """Whether the pool is full, and more messages wait for it, ready to begin, than run in it."""
        return len(state.reserved_requests) - self._under_way > 2 * Delivered.concurrency()

    def disconnected(self) -> None:
        """Drop what the worker has dropped with its connection; what is being held just now is given up later."""
        self._connection += 1
        self._is_on = False

    def _hand_over(self) -> None:
        while self._answered:
            connection, request, process = self._answered.popleft()
            self._under_way -= 1
            if connection == self._connection and request.waits:
                process(request)
            else:
                request.unhold()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def run_once(self) -> int:
        """Hold the rows of what has arrived; returns how many messages that were."""
        self._is_rung = False  # before the page is taken: a message that arrives after that rings again
        page = [self._asked.popleft() for _ in range(min(PAGE, len(self._asked)))]
        if page:
            try:
                self._hold([request for _, request, _ in page])
            finally:
                self._answered.extend(page)
                self._bell.ring()
        return len(page)

    def wait_s(self) -> float:
        """Wait for a page."""
        self._wakes.wait(REST_S)
        return 0.0

    def close(self) -> None:
        """Nothing is open: what is held is given back with all that the worker holds."""

    def _hold(self, requests: Sequence[Delivered]) -> None:
        """Hold their rows; of two messages of one row only one is held: the other is a copy."""
        tasks: dict[str, tuple[Delivered, Fresh]] = {}
        jobs: dict[RunKey, tuple[Delivered, Owed]] = {}
        for request in requests:
            match request.fresh:
                case Owed() as owed:
                    jobs[owed.job_id, owed.for_run] = request, owed
                case Fresh() as fresh:
                    tasks[fresh.key[0]] = request, fresh
        if jobs:
            self._claim(jobs)
        if tasks:
            self._hold_tasks(tasks)

    def _claim(self, jobs: Mapping[RunKey, tuple[Delivered, Owed]]) -> None:
        heartbeat = self._app.sidejob.heartbeat
        try:
            found: Mapping[RunKey, Claimed] = heartbeat.jobs.claim([owed for _, owed in jobs.values()])
        except BaseException:
            heartbeat.jobs.doubt()  # nobody knows what is claimed
            raise
        for key, claimed in found.items():
            jobs[key][0].hold(claimed)

    def _hold_tasks(self, fresh: Mapping[str, tuple[Delivered, Fresh]]) -> None:
        heartbeat, asked_at = self._app.sidejob.heartbeat, monotonic()
        worker_id = heartbeat.worker_id

        def hold(ends: Page) -> Mapping[str, Any]:
            found, ends.over = durable_runs.hold(
                heartbeat.runtime, [one for _, one in fresh.values()], worker_id=worker_id, over=ends.runs
            )
            return found

        try:
            found = heartbeat.tasks.ends.go_with(hold)
        except BaseException:
            heartbeat.tasks.doubt()  # nobody knows what is held: the processes find that out
            raise
        for task_id, row in found.items():
            request, one = fresh[task_id]
            request.hold(held_run(Held(*one.key, worker_id, row.held_at), row, asked_at))


def _fresh(request: Any) -> Fresh | Owed | None:
    try:
        fresh: Fresh | Owed | None = getattr(request, "fresh", None)
    except Exception as error:  # it is malformed, as its process finds too
        logger.debug("The row of %s is not held: %r", request, error)
        return None
    return fresh


class Bell(Pipe):
    """A pipe that the loop listens to. Loops of kombu before 5.7 have nothing of their own for other threads."""

    ring = Pipe.write

    def register(self, hub: Any, heard: Callable[[], None]) -> None:
        """Have this loop call `heard`, in its own thread, after a ring."""

        def hear() -> None:
            self.drain()
            heard()

        hub.add_reader(self.fileno(), hear)


T = TypeVar("T")


SURE_S = GRACE_S / 2
"""The oldest fetch that counts when its message is received. Later, the heartbeat might give up the rows held here."""


def held_run(held: Held, row: Any, asked_at: float) -> HeldRun:
    """Return how a worker holds the row of a message that it receives now, and has fetched since `asked_at`."""
    return HeldRun(held, row.queue, row.waited_s, stands=monotonic() - asked_at < SURE_S)


class WorkerOutbox:
    """Implements the transport's `Outbox` for one connection of this worker."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        most = app.sidejob.settings.max_losses
        self._may_repeat = {
            name: losses
            for name, task in app.tasks.items()
            if is_durable(app, name)
            and lost_policy(task) == REQUEUE
            and (losses := getattr(task, "max_losses", None) or most) > 1  # else its first loss is to count
        }
        self._asked, self._asked_at = NOBODY, 0.0

    def asks(self) -> Holder:
        """Return in whose name the fetch that follows at once holds rows; `NOBODY` if that is not known just now."""
        heartbeat, self._asked_at = self._app.sidejob.heartbeat, monotonic()
        knows = heartbeat is not None and heartbeat.may_claim
        self._asked = Holder(heartbeat.worker_id, self._may_repeat) if knows else NOBODY
        return self._asked

    @property
    def is_busy(self) -> bool:
        """Whether a fetch may wait: see `delivered.is_busy`."""
        return is_busy()

    def compose(self, row: Any) -> Payload | None:
        """Return the message that a fetched reference leads to, with the hold of its row if it was held."""
        found = message_of(self._app, row)
        if found is not None and getattr(row, "held_at", None) is not None:
            found.held = held_run(self._held(row), row, self._asked_at)
        return found

    def unhold(self, rows: Sequence[Any]) -> None:
        """Give back rows that were held with their fetch."""
        self._app.sidejob.heartbeat.tasks.unhold(*map(self._held, rows))

    def with_ends(self, statement: Callable[[acknowledgements.Page], T]) -> T:
        """Run a statement that is to remove the rows of runs that are over."""

        def reached(page: acknowledgements.Page) -> T:
            if page.runs:
                reach("durable-end:before-commit")
            found = statement(page)
            if page.runs:
                over, page.over = page.over, None  # should a test have the answer lost here, nobody knows
                reach("durable-end:after-commit")
                page.over = over
            return found

        done: T = self._app.sidejob.heartbeat.tasks.ends.go_with(reached)
        return done

    def _held(self, row: Any) -> Held:
        return Held(row.task_id, row.generation, self._asked.worker_id, row.held_at, row.id)


def message_of(app: Celery, row: Any) -> Payload | None:
    """Return kombu's message for a fetched reference and its row; None if no run is owed any more.

    Also None for a row that is unreadable here: it is sent again when it has been silent for a while, perhaps to a
    newer worker, and the sweeper buries rows that are unreadable for all.
    """
    try:
        found = _in_kombus_form(app, row)
    except (InvalidValueError, NewerFormatError) as error:
        logger.warning("A message in queue %s is left: %s", row.queue, error)
        return None
    if found is None:
        return None
    properties = found["properties"]  # kombu's transports have the priority in both places; Celery reads this one
    properties["priority"] = properties["delivery_info"]["priority"]
    return Payload(found)


def _in_kombus_form(app: Celery, row: Any) -> dict[str, Any] | None:
    if row.job_id is not None:
        options = json.loads(row.options) if row.options else None
        bell = Doorbell(row.job_id, row.generation, row.task_id, row.task, row.queue, row.priority, options)
        return doorbell.delivered(app, bell)
    if row.kept is None:
        return None
    message = Message(
        row.task_id,
        row.task,
        row.queue,
        row.publication,
        bytes(row.kept),
        row.generation,
        expires_at=row.expires_at,
        again=row.again or row.returns > 0,
    )
    return kept_message.delivered(message)

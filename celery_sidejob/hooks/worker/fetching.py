"""How much a worker fetches: what it can begin within about a second. What it cannot begin it gives back.

Celery fetches `worker_prefetch_multiplier` messages ahead for each process. A message that is fetched so, behind runs
that take hours, would wait for their end while other workers have nothing to do. So how many messages a worker fetches
ahead follows from how many runs ended here in the last second: with short runs that is all that Celery allows, with
long ones nothing. What was fetched before the runs became long goes back to the head of its queue, and the worker
fetches again when its pool can begin another run: among workers that are all busy no message goes to and fro.

With very short runs it is more than Celery allows, since a statement for many messages takes little longer than one for
a few. That holds only where all that is fetched can go back: jobs and durable tasks without a rate limit of Celery's,
from the queues of our transports and of Redis.

A request that never leaves Celery's sets would keep its place in the pool for good. So these sets are compared with the
pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty
from time import monotonic
from typing import Any

from amqp.exceptions import ChannelError, RecoverableConnectionError
from celery.concurrency.solo import TaskPool as Solo
from celery.worker import state

from ...model.logger import logger
from ..patches import celery_worker, connections
from . import pool_process
from .delivered import Delivered, is_busy, undeliver
from .holding import Bell, Holding

LOOK_S = 0.25
BRIEF_S = 0.125
"""So many seconds of runs may be here, if these are more messages than Celery's limit."""
MOST_BEYOND = 3
"""The most messages beyond Celery's limit, as a multiple of it."""
UNRETURNABLE_S = 1.0
"""After a message that cannot be given back, nothing is fetched beyond Celery's limit for so long."""
LONG_S = 1.0
"""How long a message waits here, at most, while the pool begins nothing."""
LOOKS_AT_IDLE = 20
"""After so many looks at a pool that has no run, what counts as running in it does not."""


class Fetcher:
    """How a worker fetches over one connection. This one leaves it to Celery; subclasses do not."""

    is_shut = False
    """Whether it fetches nothing for now, because there was no room."""

    def is_beyond_limit(self, request: Any) -> bool:
        """Tell whether this message came beyond Celery's limit, and can go back."""
        return False

    def before(self, request: Any) -> None:
        """Stop fetching if this message, which is about to be handed over, fills the pool."""

    def hold(self) -> None:
        """Stop fetching if the pool is full; waits for nothing."""

    def adjust(self) -> None:
        """Fetch as much as there is room for now; called by the thread that fetches."""

    def in_order(self, waiting: list[Delivered]) -> list[Delivered]:
        """Return messages, the first fetched first, in the order in which they are to be given back."""
        return waiting

    def may_return(self, request: Any) -> bool:
        """Tell whether another worker can have a message that is given back."""
        return False

    def shut(self) -> None:
        """Fetch no more, and receive what is on its way already: the worker stops."""


class Appetite:
    """How much one worker fetches: counts what waits for its pool, and what has ended in it lately."""

    name = "appetite"

    def __init__(self, c: Any) -> None:
        self._c = c
        self._is_solo = isinstance(c.pool, Solo)
        celery_worker.hand_over_by(c, self._handle)
        self._waiting: dict[Delivered, float] = {}
        self._ended: deque[tuple[float, int]] = deque([(monotonic(), _ended())])
        self._unreturnable_at = -inf
        """When the last message came that cannot be given back: of a task that is neither durable nor a job."""
        self._may_go_beyond = False
        """Whether an event loop runs, which returns at once what came beyond the limit and cannot wait here."""
        self._too_many: list[Any] = []
        """Such messages."""
        self._looks_at_idle = 0
        self._bell = Bell()
        self.holding = Holding(c.app)
        self._fetcher = Fetcher()
        self._stops = False
        self.tell: Callable[[], object] = self._bell.ring
        """Wakes the thread that fetches; from any thread."""

    # -- the rule --------------------------------------------------------------------------------------------------

    @property
    def concurrency(self) -> int:
        """How many runs the pool takes at a time, or will when it has grown."""
        return getattr(self._c.controller, "max_concurrency", None) or pool_process.concurrency(self._c.pool)

    @property
    def ahead(self) -> int:
        """How many messages may wait here: as many as runs ended in the last second, beyond the pool's concurrency.

        One end for each of its processes says nothing: these runs may have taken hours. With solo none may wait, since
        nobody can give back anything while its one thread is in a body.
        """
        return 0 if self._is_solo else max(0, self._ended_lately - self.concurrency)

    @property
    def beyond(self) -> int:
        """How many messages may be here beyond Celery's limit: none unless each can be given back.

        Who sets `worker_prefetch_multiplier` to 1 wants none. What waits for a rate limit is handed to nobody until its
        turn, and this worker keeps it.
        """
        limit: int = self._c.initial_prefetch_count
        if not self._may_go_beyond or limit <= self.concurrency:
            return 0
        if monotonic() - self._unreturnable_at < UNRETURNABLE_S:
            return 0
        more = min(round(self._ended_lately * BRIEF_S) - limit, MOST_BEYOND * limit)
        return 0 if more <= 0 or any(self._c.task_buckets.values()) else more

    @property
    def _ended_lately(self) -> int:
        """How many runs have ended in about the last second."""
        return _ended() - self._ended[0][1]

    @property
    def room(self) -> int:
        """How many more messages may be fetched."""
        return 0 if self._stops else max(0, self.concurrency + self.ahead - len(state.reserved_requests))

    @property
    def idle(self) -> int:
        """How many messages may be fetched that the pool begins at once."""
        return min(self.room, max(0, self.concurrency - len(state.reserved_requests)))

    @property
    def is_full(self) -> bool:
        """Whether one more message would have to wait for a run that may take long."""
        return self._stops or not (self.room or self.ahead)

    # -- what becomes of messages ----------------------------------------------------------------------------------

    def _handle(self, process: Callable[[Any], Any], request: Any) -> None:
        """Replaces handing a message to the pool at once, whatever the pool is doing."""
        if isinstance(request, Delivered):
            if self._stops:
                request.give_back()
                return
            if self._fetcher.may_return(request):
                self._waiting[request] = monotonic()
        else:
            self._unreturnable_at = monotonic()
            if self._may_go_beyond and self._fetcher.is_beyond_limit(request):
                self._too_many.append(request)
                return
        self._fetcher.before(request)
        self.holding.hand_over(process, request)

    def run_once(self) -> None:
        """Give back what has waited for too long; in the thread that fetches, or a greenlet beside it."""
        now = monotonic()
        self._ended.append((now, _ended()))
        while now - self._ended[1][0] >= LONG_S:
            self._ended.popleft()
        self._waiting = {one: since for one, since in self._waiting.items() if one.waits}
        beyond = list(self._waiting)[self.ahead :]
        if any(now - self._waiting[one] >= LONG_S for one in beyond):
            self._fetcher.hold()  # else they might come back at once
            self._give_back(beyond)  # all together, so that they keep their order
        self._compare()
        self.over()

    def _compare(self) -> None:
        """Forget what counts as running, and is not in the pool look after look: nobody would tell of its end."""
        semaphore = self._c.controller.semaphore
        taken = semaphore is not None and semaphore.value < semaphore.initial_value
        differs = pool_process.is_idle(self._c.pool) and (taken or state.reserved_requests)
        self._looks_at_idle = self._looks_at_idle + 1 if differs else 0
        if self._looks_at_idle < LOOKS_AT_IDLE:
            return
        lost = list(state.reserved_requests)
        logger.error(
            "The pool of this worker is idle, while %d messages count as running in it, and take its places. They are "
            "forgotten; those that are not acknowledged go back to the broker. Please report this.",
            len(lost),
        )
        for request in lost:
            state.task_ready(request)
            request.reject(requeue=True)
            if isinstance(request, Delivered):
                request.over()
        if semaphore is not None:
            semaphore.clear()

    def wait_s(self) -> float:
        """Return how long to wait between two looks."""
        return LOOK_S

    def close(self) -> None:
        """Nothing is open."""

    def over(self) -> None:
        """Note that the pool may have room; from any thread."""
        if self._fetcher.is_shut:
            self.tell()

    # -- one connection --------------------------------------------------------------------------------------------

    def start(self, fetcher: Fetcher) -> None:
        """Fetch over a new connection: what had waited is gone with the old one, what runs runs on."""
        self._fetcher = fetcher
        self._waiting.clear()
        self._too_many.clear()
        Delivered.over_here = self.over
        Delivered.concurrency = lambda: self.concurrency
        semaphore = self._c.controller.semaphore
        if semaphore is not None:  # Celery has reset it, and runs go on
            semaphore.value = max(0, semaphore.initial_value - len(state.active_requests))

    def register(self, hub: Any) -> None:
        """Look again and again in this event loop, and after each of its rounds whether there is room."""
        self._bell.register(hub, self._adjust)
        self.holding.register(hub)
        hub.on_tick.add(self._adjust)
        self._may_go_beyond = True
        hub.call_repeatedly(LOOK_S, self._look)

    def _adjust(self) -> None:
        self._return_too_many()
        if self._fetcher.is_shut:
            self._fetcher.adjust()

    def _look(self) -> None:
        self.run_once()
        self._fetcher.adjust()

    def _return_too_many(self) -> None:
        """Return the messages that came beyond Celery's limit and could not go back later; it is no delivery."""
        too_many, self._too_many = self._too_many, []
        for request in self._fetcher.in_order(too_many):
            undeliver(request)

    def stop(self) -> None:
        """Give back all that has not begun: a warm stop waits for what runs, which may be hours."""
        self._stops = True
        self._fetcher.shut()
        self._return_too_many()
        self._give_back(list(self._waiting))
        self._waiting.clear()

    def _give_back(self, waiting: list[Delivered]) -> None:
        given_back = sum(one.give_back() for one in self._fetcher.in_order(waiting))
        if given_back:
            logger.info("Gave back %d messages that could not begin here: this worker is busy, or stops", given_back)


def _ended() -> int:
    """Return how many runs have ended in this worker since it began."""
    return int(state.all_total_count[0]) - len(state.active_requests)


UNLIMITED = 65535
"""The largest prefetch that RabbitMQ accepts."""


class FromChannel(Fetcher):
    """From a channel that asks its QoS before it fetches, so nothing need be stopped."""

    def __init__(self, c: Any, appetite: Appetite) -> None:
        self._appetite = appetite
        self._channel = c.task_consumer.channel
        self._errors = c.connection_errors

        def may_consume() -> bool:
            self.is_shut = not appetite.room
            return self._has_asked or not (self.is_shut or self._has_enough)

        connections.limit_fetching(
            self._channel.qos, may=may_consume, room=lambda: self._room, beyond=lambda: appetite.beyond
        )

    @property
    def _room(self) -> int:
        """How many more messages may be fetched."""
        return self._appetite.room

    @property
    def _has_asked(self) -> bool:
        """Whether an answer of the broker is on its way: if nobody read it, nobody would have the message in it."""
        return False

    @property
    def _has_enough(self) -> bool:
        """Whether the next fetch waits until there is more to be fetched at once."""
        return False

    def is_beyond_limit(self, request: Any) -> bool:
        """Counts as Celery does: what was acknowledged early, or needs no acknowledgement, does not count."""
        qos = self._channel.qos
        if request.message.delivery_tag not in qos._delivered:
            return False
        return bool(0 < qos.prefetch_count < len(qos._delivered) - len(qos._dirty))

    def may_return(self, request: Any) -> bool:
        """It is fetched again only when there is room."""
        return True


class FromPostgres(FromChannel):
    """From Postgres. A fetch is one statement, and a message that is given back is in its place again."""

    def __init__(self, c: Any, appetite: Appetite) -> None:
        super().__init__(c, appetite)
        self._wake = c.connection.transport.wake
        appetite.tell = self._wake

    def adjust(self) -> None:
        """Have the channel ask again, if there is room that it does not know of."""
        if self.is_shut and self._appetite.room:
            self._wake()


class FromRedis(FromChannel):
    """From Redis, by kombu's transport or by ours."""

    def __init__(self, c: Any, appetite: Appetite) -> None:
        super().__init__(c, appetite)
        self._prefetches = not c.app.conf.get("worker_disable_prefetch")

    @property
    def _room(self) -> int:
        # Celery's own check knows only whether one more message may be fetched, and our transport fetches several.
        return self._appetite.room if self._prefetches else self._appetite.idle

    @property
    def _has_asked(self) -> bool:
        return bool(self._channel._in_poll)

    @property
    def _has_enough(self) -> bool:
        return hasattr(self._channel, "give_back") and is_busy()  # kombu's fetches one message at a time

    def in_order(self, waiting: list[Delivered]) -> list[Delivered]:
        """Each goes to the head of its list, so the first one goes last."""
        return waiting[::-1]

    def shut(self) -> None:
        """Read the answer to what kombu's transport has asked for already: it may be a message."""
        asked = getattr(self._channel, "_asked", None)
        if self._channel._in_poll and state.active_requests and (asked is None or asked.name == "FETCH"):
            with suppress(Empty, *self._errors):  # what is lost with its connection is found by the sweeper
                self._channel._brpop_read()


class FromRabbitMQ(Fetcher):
    """From RabbitMQ, which sends by itself: as many unacknowledged messages as the prefetch allows.

    It knows the order of what is given back, or puts it behind what was given back before (`docs/rabbitmq.md`).

    A job's message is acknowledged when its run begins. So when the pool is full the consumers are cancelled, before
    the acknowledgement that would bring the next message. Nobody waits for the answer, as a delivery is in progress.
    """

    def __init__(self, c: Any, appetite: Appetite) -> None:
        self._c = c
        self._appetite = appetite
        self._is_solo = isinstance(c.pool, Solo)
        self._consumer = c.task_consumer
        self._consume = connections.replace_consume(self._consumer, self._open)
        self._set_window = connections.replace_prefetch(c.qos, self._note_most)
        self._most = UNLIMITED
        self._note_most(prefetch_count=c.initial_prefetch_count)
        self._window = 0
        self._cancelled: list[str] = []
        if getattr(c.pool, "is_green", False):
            connections.call_before_waits(c.connection, self._adjust_and_tell, look_s=LOOK_S)

    def before(self, request: Any) -> None:
        """With solo what holds back the next message is this one, unless it is acknowledged before its run."""
        if self._is_solo and (isinstance(request, Delivered) or request.task.acks_late):
            return
        self.hold()

    def hold(self) -> None:
        """Cancel, if the pool is full."""
        if self._appetite.is_full:
            self._close()

    def adjust(self) -> None:
        """Consume what there is room for."""
        if self._appetite.is_full:
            self._close()
        elif self.is_shut:
            self._open()
        elif self._wanted() != self._window:
            self._close()  # a prefetch of one consumer, as quorum queues want it, is that of new ones
            self._open()

    def may_return(self, request: Any) -> bool:
        """Not what came by a queue that only this worker serves: there it would come back at once."""
        tag = request.message.delivery_info["consumer_tag"]
        return all(self._consumer._active_tags.get(queue.name) != tag for queue in self._temporary())

    def shut(self) -> None:
        """Cancel, and wait for an answer: what was sent before that is received, and goes back."""
        with suppress(*self._c.connection_errors):
            self._close()
            self._set_window(prefetch_count=1)

    def _note_most(self, *, prefetch_count: int) -> None:
        """Replaces telling RabbitMQ: Celery's prefetch is a limit to ours."""
        self._most = prefetch_count or UNLIMITED

    def _wanted(self) -> int:
        """Return how many unacknowledged messages this worker wants: what it holds anyway, and what it may begin."""
        c = self._c
        held = max(0, c.qos.value - c.initial_prefetch_count)  # until their time
        held += sum(not request.message.acknowledged for request in list(state.active_requests))
        held += sum(len(bucket.contents) for bucket in c.task_buckets.values() if bucket)  # for their rate limit
        concurrency, ahead = self._appetite.concurrency, self._appetite.ahead
        # In steps, so that RabbitMQ is not told at each look.
        room = -(-ahead // concurrency) * concurrency if ahead else 0
        return int(max(1, min(self._most, held + room + max(0, concurrency - len(state.active_requests)))))

    def _open(self) -> None:
        """Consume from all queues that are not consumed from; a queue that is gone breaks the connection."""
        if self._appetite.is_full:
            self.is_shut = True
            return
        with _breaking_if_gone():
            window = self._wanted()
            if window != self._window:
                self._set_window(prefetch_count=window)
                self._window = window
            self._consume()
        self.is_shut = False
        for tag in self._cancelled:  # the answer says that all that came by them has arrived
            self._consumer.channel.callbacks.pop(tag, None)
        self._cancelled.clear()

    def _close(self) -> None:
        """Cancel all consumers but those whose queue would go with its last one; only writes."""
        temporary = {queue.name for queue in self._temporary()}
        tags = self._consumer._active_tags
        for queue in [queue for queue in tags if queue not in temporary]:
            tag = tags.pop(queue)
            self._cancelled.append(tag)
            self._consumer.channel.basic_cancel(tag, nowait=True)
        self.is_shut = True

    def _temporary(self) -> list[Any]:
        return [
            queue
            for queue in self._consumer.queues
            if queue.auto_delete or queue.exclusive or queue.expires or "x-expires" in (queue.queue_arguments or {})
        ]

    def _adjust_and_tell(self) -> bool:
        self.adjust()
        return self.is_shut


@contextmanager
def _breaking_if_gone() -> Iterator[None]:
    try:
        yield
    except ChannelError as error:
        raise RecoverableConnectionError(f"RabbitMQ lets this worker consume no more: {error}") from error


def fetcher_of(c: Any, appetite: Appetite) -> Fetcher:
    """Return how a worker fetches over its connection; where kombu's transport has no means for that, Celery's way."""
    kinds: dict[str, Callable[[Any, Appetite], Fetcher]] = {
        "redis": FromRedis, "postgres": FromPostgres, "amqp": FromRabbitMQ
    }  # fmt: skip
    kind = kinds.get(c.connection.transport.driver_type)
    return Fetcher() if kind is None else kind(c, appetite)

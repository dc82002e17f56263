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
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from celery.concurrency.solo import TaskPool as Solo
from celery.worker import state

from ...model.logger import logger
from ..patches import celery_worker
from . import pool_kind
from .delivered import Delivered, undeliver
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
    """How a worker fetches over one connection. This one leaves it to Celery; `fetching.py` has those that do not."""

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
        return getattr(self._c.controller, "max_concurrency", None) or pool_kind.concurrency(self._c.pool)

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
        differs = pool_kind.is_idle(self._c.pool) and (taken or state.reserved_requests)
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

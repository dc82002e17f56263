"""How much a worker fetches ahead, by the rule alone; what it gives back is in tests/acceptance/test_hostages.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, bootsteps
from celery.concurrency.gevent import TaskPool
from celery.worker import state
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from kombu.transport.virtual import QoS
from kombu.utils.limits import TokenBucket

from celery_sidejob import SideJob
from celery_sidejob.hooks.steps import DisconnectionStep
from celery_sidejob.hooks.worker import fetching as appetites
from celery_sidejob.hooks.worker.delivered import Delivered
from celery_sidejob.hooks.worker.fetching import Appetite, Fetcher, FromRedis


class Run:
    """Celery's request, as far as its state goes."""

    id = "a run"

    def __init__(self) -> None:
        self.went_back = False

    def reject(self, *, requeue: bool) -> None:
        """Give up its message."""
        self.went_back = requeue


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The seconds that have passed, with no run in this process."""
    state.reset_state()
    now = [100.0]
    monkeypatch.setattr(appetites, "monotonic", lambda: now[0])
    yield now
    state.reset_state()


def worker_of(concurrency: int) -> Any:
    """What Celery's consumer shows of its worker."""
    controller = SimpleNamespace(max_concurrency=None, semaphore=LaxBoundedSemaphore(concurrency), _process_task=None)
    pool = SimpleNamespace(num_processes=concurrency)
    return SimpleNamespace(
        app=None, pool=pool, controller=controller, on_task_request=None, initial_prefetch_count=4 * concurrency,
        task_buckets={"quick": None},
    )  # fmt: skip


class OfTransport(Fetcher):
    """Fetches by a transport of ours."""

    has_too_many = False

    def is_beyond_limit(self, request: Any) -> bool:
        """Tell what the test says."""
        return self.has_too_many


class Plain(Run):
    """The request of a task that is neither durable nor a job, from a channel of ours."""

    connection_errors = ()

    def __init__(self) -> None:
        super().__init__()
        self.acknowledged = False
        self.message = SimpleNamespace(channel=self, delivery_tag=1)

    def give_back(self, delivery_tag: int) -> None:
        """Take the message back."""
        self.went_back = True

    def send_event(self, *_: Any, **__: Any) -> None:
        """Nobody listens."""


def fetching_beyond(worker: Any) -> Appetite:
    """The appetite of a worker with an event loop."""
    appetite = Appetite(worker)
    appetite._may_go_beyond = True
    return appetite


def end(runs: int) -> None:
    """Have so many runs begin and end."""
    state.all_total_count[0] += runs


def test_a_new_worker_fetches_what_it_can_begin(clock: list[float]) -> None:
    appetite = Appetite(worker_of(3))
    assert (appetite.room, appetite.is_full) == (3, False)

    runs = [Run() for _ in range(3)]
    state.reserved_requests.update(runs)

    assert (appetite.room, appetite.is_full) == (0, True)


def test_greenlets_are_as_many_as_the_pool_may_have(clock: list[float]) -> None:
    """In Celery 5.5 its `num_processes` is how many run: the worker would begin one body after another."""
    worker = worker_of(3)
    worker.pool = TaskPool(3)
    worker.pool.on_start()
    assert Appetite(worker).concurrency == 3

    worker.pool.grow(2)

    assert Appetite(worker).concurrency == 5


def test_what_the_pool_does_not_have_is_forgotten_after_a_while(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """By whatever mistake: the worker would beat, and fetch nothing more."""
    worker = worker_of(2)
    appetite = Appetite(worker)
    runs = [Run(), Run()]
    state.reserved_requests.update(runs)
    state.active_requests.update(runs)
    for _ in runs:
        worker.controller.semaphore.acquire(lambda: None)

    worker.pool.unfinished = {"a thread's future"}
    for _ in range(appetites.LOOKS_AT_IDLE + 1):
        appetite.run_once()
    assert appetite.room == 0

    worker.pool.unfinished.clear()
    for _ in range(appetites.LOOKS_AT_IDLE - 1):
        appetite.run_once()
    assert (appetite.room, caplog.messages) == (0, [])
    appetite.run_once()

    assert (appetite.room, worker.controller.semaphore.value, len(state.active_requests)) == (2, 2, 0)
    assert [run.went_back for run in runs] == [True, True]
    assert "2 messages count as running in it" in caplog.text


@pytest.mark.parametrize(("ended", "ahead"), [(0, 0), (3, 0), (4, 1), (100, 97)])
def test_it_fetches_ahead_when_runs_ended_again_and_again(
    clock: list[float], ended: int, ahead: int
) -> None:  # fmt: skip
    appetite = Appetite(worker_of(3))
    end(ended)
    assert appetite.ahead == ahead

    for _ in range(5):  # and not on account of what ended long ago
        clock[0] += 0.25
        appetite.run_once()

    assert appetite.ahead == 0


@pytest.mark.parametrize(
    ("ended", "limit", "beyond"),
    [(96, 12, 0), (100, 12, 0), (160, 12, 8), (100_000, 12, 36), (100_000, 3, 0), (100_000, 0, 0)],
    ids=["Celery's is as much", "or about that", "more runs in an eighth of a second", "at most", "one each", "none"],
)
def test_of_very_short_runs_it_fetches_more_than_celery_allows(
    clock: list[float], ended: int, limit: int, beyond: int
) -> None:
    worker = worker_of(3)
    worker.initial_prefetch_count = limit
    appetite = fetching_beyond(worker)
    end(ended)
    assert appetite.beyond == beyond


def test_beyond_celerys_limit_it_fetches_only_what_can_be_given_back(clock: list[float]) -> None:
    appetite = fetching_beyond(worker_of(3))
    appetite._fetcher = OfTransport()
    end(100_000)
    runs = [Plain(), Plain(), Plain()]
    handed_over: list[Any] = []
    for run in runs:
        state.reserved_requests.add(run)
    appetite._handle(handed_over.append, runs[0])
    appetite._fetcher.has_too_many = True
    appetite._handle(handed_over.append, runs[1])
    appetite._handle(handed_over.append, runs[2])

    assert appetite.beyond == 0
    appetite._adjust()
    assert handed_over == runs[:1]
    assert [(run.went_back, run.acknowledged) for run in runs] == [(False, False), (True, True), (True, True)]
    assert set(state.reserved_requests) == {runs[0]}
    clock[0] += 1.0
    assert appetite.beyond == 36


@pytest.mark.parametrize("goes_back", [True, False], ids=["a warm stop", "a new connection"])
def test_what_came_beyond_celerys_limit_waits_for_no_stop_and_outlives_no_connection(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, goes_back: bool
) -> None:
    for name in ("over_here", "concurrency"):  # which `start` replaces
        monkeypatch.setattr(Delivered, name, getattr(Delivered, name))
    appetite = fetching_beyond(worker_of(3))
    appetite._fetcher = OfTransport()
    appetite._fetcher.has_too_many = True
    run = Plain()
    appetite._handle(lambda request: None, run)

    if goes_back:
        appetite.stop()
    else:
        appetite.start(Fetcher())
        appetite._adjust()

    assert run.went_back == goes_back


def test_beyond_celerys_limit_it_fetches_nothing_that_may_wait_here_for_a_rate_limit(clock: list[float]) -> None:
    """Such a message is handed over when it is its turn, and nobody can give it back before."""
    worker = worker_of(3)
    worker.task_buckets["limited"] = TokenBucket(1 / 3600)
    appetite = fetching_beyond(worker)
    end(100_000)
    assert appetite.beyond == 0


@pytest.mark.parametrize(("disables", "room"), [(False, 12), (True, 2)])
def test_without_prefetch_it_fetches_what_its_pool_begins_at_once(
    clock: list[float], disables: bool, room: int
) -> None:
    """Celery's `worker_disable_prefetch` decides whether one more may be fetched, and our transports fetch several."""
    worker = worker_of(3)
    worker.app = Celery(set_as_current=False)
    worker.app.conf.worker_disable_prefetch = disables
    channel = SimpleNamespace(qos=QoS(SimpleNamespace(do_restore=False), prefetch_count=12))
    worker.task_consumer, worker.connection_errors = SimpleNamespace(channel=channel), ()
    appetite = Appetite(worker)
    end(90)
    runs = [Run()]
    state.reserved_requests.update(runs)

    FromRedis(worker, appetite)

    assert channel.qos.can_consume_max_estimate() == room


def test_what_runs_on_after_its_connection_broke_still_has_its_place(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery takes the whole pool for free then, and would hand the pool what nobody could give back any more."""
    for name in ("over_here", "concurrency"):  # which `start` replaces
        monkeypatch.setattr(Delivered, name, getattr(Delivered, name))
    worker = worker_of(3)
    running = [Run(), Run()]
    state.active_requests.update(running)
    worker.controller.semaphore.clear()

    Appetite(worker).start(Fetcher())

    assert worker.controller.semaphore.value == 1


@pytest.mark.parametrize(("state", "room"), [(bootsteps.RUN, 3), (bootsteps.CLOSE, 0)])
def test_only_a_worker_that_stops_fetches_no_more(clock: list[float], state: int, room: int) -> None:
    """To connect again Celery stops its steps as well, and before 5.7 it leaves the broken connection in place."""
    consumer = worker_of(3)
    consumer.app = Celery(set_as_current=False)
    consumer.app.conf.sidejob_database_url = "postgresql://nobody.listens/"
    SideJob(consumer.app)
    consumer.blueprint = SimpleNamespace(state=state, start=None)
    consumer.on_unknown_task = consumer.on_invalid_task = consumer.on_decode_error = None
    consumer.create_task_handler = None
    consumer.connection, consumer.on_connection_error_after_connected = object(), None
    step = DisconnectionStep(consumer)

    step.stop(consumer)

    assert step._appetite is not None
    assert step._appetite.room == room

"""`TaskPool.on_apply` begins a run: in a thread, or in a greenlet once one is free."""

from __future__ import annotations

import inspect
import subprocess
import sys
from asyncio import CancelledError
from collections.abc import Iterator
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.concurrency.gevent import TaskPool as Greenlets
from celery.concurrency.solo import TaskPool as Solo
from celery.concurrency.thread import TaskPool
from celery.worker import state

from celery_sidejob.hooks.patches import pools

BUSY = """
from celery import maybe_patch_concurrency
maybe_patch_concurrency(["celery", "worker", "--pool=gevent"])
import gevent
from celery import Celery
from celery.concurrency.gevent import TaskPool
from celery_sidejob.hooks.patches import pools

pool = TaskPool(1, app=Celery("greenlets", set_as_current=False))
pool.start()
pools.let_messages_wait(pool)
ended = []

def body(number):
    gevent.sleep(0.01)
    return number

for number in range(3):
    pool.apply_async(body, (number,), callback=ended.append)
print(ended)
while len(ended) < 3:
    gevent.sleep(0.01)
print(ended)
"""


@pytest.mark.parametrize("kind", [TaskPool, Greenlets])
def test_what_it_is_called_with(kind: Any) -> None:
    names = list(inspect.signature(kind.on_apply).parameters)
    assert names[:6] == ["self", "target", "args", "kwargs", "callback", "accept_callback"]


def test_messages_wait_for_a_greenlet_in_their_order_and_nobody_waits_for_them() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.splitlines() == ["[]", "[0, 1, 2]"]


@pytest.fixture
def pool() -> Iterator[Any]:
    """Threads that have been told to end, as a cold stop does in the midst of whatever the worker does."""
    made = TaskPool(1, app=Celery("threads", set_as_current=False))
    made.start()
    pools.end_quietly(made)
    assert made.apply_async(lambda: None) is not None
    made.stop()
    yield made
    state.should_terminate = None


def test_what_is_received_during_a_cold_stop_does_not_fail_the_worker(pool: Any) -> None:
    state.should_terminate = True

    assert pool.apply_async(lambda: None) is None


def test_threads_that_are_gone_without_a_stop_are_told_of(pool: Any) -> None:
    with pytest.raises(RuntimeError, match="cannot schedule"):
        pool.apply_async(lambda: None)


class Told:
    """Celery's request, as far as a pool tells it of its run."""

    def __init__(self, *, fails_over_it: bool) -> None:
        self.of: list[Any] = []
        self._fails = fails_over_it

    def on_success(self, result: Any) -> None:
        self._note(result)

    def on_failure(self, info: Any) -> None:
        self._note(type(info.exception.exc))

    def reject(self, *, requeue: bool) -> None:
        self.of.append("kept" if requeue else "given up, if it is not over")

    def _note(self, what: Any) -> None:
        self.of.append(what)
        if self._fails:
            raise TypeError("its chain is no list")


@pytest.mark.parametrize("fails", [False, True], ids=["", "the request fails over it"])
@pytest.mark.parametrize("kind", [TaskPool, Solo])
@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError, ValueError), (MemoryError, WorkerLostError), (SystemExit, WorkerLostError),
        (CancelledError, WorkerLostError), (None, "ended"),
    ],
)  # fmt: skip
def test_a_request_is_told_how_its_run_ended_whatever_was_raised(
    kind: Any, raised: type[BaseException] | None, told: Any, fails: bool
) -> None:
    """A thread forgot it, and the request counted as running for good; solo ended."""
    pool = kind(1, app=Celery("failing", set_as_current=False))
    pool.start()
    pools.report_failures(pool)
    request = Told(fails_over_it=fails)

    def traced() -> str:
        if raised is not None:
            raise raised
        return "ended"

    pool.apply_async(traced, callback=request.on_success, error_callback=request.on_failure)
    pool.stop()

    assert request.of[0] == told
    assert set(request.of[1:]) == ({"given up, if it is not over"} if raised or fails else set())

"""`TaskPool.on_apply` begins a run: in a thread, or in a greenlet once one is free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.concurrency.thread import TaskPool
from celery.worker import state

from celery_sidejob.hooks.patches import pool_apply


@pytest.fixture
def pool() -> Iterator[Any]:
    """Threads that have been told to end, as a cold stop does in the midst of whatever the worker does."""
    made = TaskPool(1, app=Celery("threads", set_as_current=False))
    made.start()
    pool_apply.end_quietly(made)
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

"""A process that is forked while services work does not inherit the locks they hold."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from celery_sidejob.services.loop import Loop
from celery_sidejob.services.sweep import results as sweep_results
from celery_sidejob.services.sweep.sweeper import Sweeper
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

TURNS = 20


class Worker:
    """A service whose every turn holds a lock that a forked process needs."""

    name = "worker"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.in_turn = threading.Event()

    def run_once(self) -> None:
        with self.lock:
            self.in_turn.set()
            threading.Event().wait(0.01)

    def wait_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from 3.12 on; billiard forks all the same


def fork_and_try(lock: threading.Lock) -> int:
    """Fork; 0 if the child finds the lock free."""
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(blocking=False) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_the_turn_in_progress() -> None:
    service = Worker()
    loop = Loop(service)
    loop.start()
    try:
        for _ in range(TURNS):
            service.in_turn.clear()
            assert service.in_turn.wait(5)
            assert fork_and_try(service.lock) == 0
    finally:
        loop.stop()


class Sweeping:
    """Stands for a worker of which the sweeper is a service."""

    lock_lost_at = float("-inf")

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id

    def sweep_is_due(self) -> bool:
        return True


def test_a_fork_waits_for_the_thread_that_speaks_to_the_backend(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no turn of the sweeper's, and holds locks of the backend's that a pool process would want."""
    lock, speaking = threading.Lock(), threading.Event()

    def deliver(self: Any, outcome: Any) -> bool:
        with lock:
            speaking.set()
            threading.Event().wait(0.1)
        return True

    monkeypatch.setattr(sweep_results, "RESULT_GRACE_S", 0.0)
    stage.job()
    stage.drain()
    stage.sql("UPDATE askings SET stored_at = NULL")
    monkeypatch.setattr(type(stage.runtime.results), "deliver", deliver)

    Sweeper(stage.runtime, Sweeping(stage.worker_id)).run_once()

    assert speaking.wait(5)
    assert fork_and_try(lock) == 0
    wait_until(lambda: stage.sql("SELECT 1 FROM askings WHERE stored_at IS NOT NULL"), message="it to be stored")

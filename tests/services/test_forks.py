"""A process that is forked while services work does not inherit the locks they hold."""

from __future__ import annotations

import os
import threading

import pytest

from celery_sidejob.services.loop import Loop

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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # from 3.12 on; billiard forks all the same
def test_a_fork_waits_for_the_turn_in_progress() -> None:
    service = Worker()
    loop = Loop(service)
    loop.start()
    try:
        for _ in range(TURNS):
            service.in_turn.clear()
            assert service.in_turn.wait(5)
            child = os.fork()
            if child == 0:
                os._exit(0 if service.lock.acquire(blocking=False) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        loop.stop()

"""The death of a worker's processes is noticed, whoever reaps them, and however short they lived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from celery_sidejob.services.heartbeat.pool_processes import ENDS_OF_PLAN, PoolProcesses
from tests.tools.waiting import wait_until


def child(code: str = "pass") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.mark.parametrize("code", sorted(ENDS_OF_PLAN))
def test_an_end_as_planned_is_no_death_unless_it_was_busy(code: int) -> None:
    process = child(f"import os; os._exit({code})")
    idle, busy = PoolProcesses(lambda: [process.pid]), PoolProcesses(lambda: [process.pid])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert idle.died() == []
    assert busy.died({process.pid}) == [process.pid]
    process.wait()


def test_a_kill_is_noticed_once_and_the_pool_is_told() -> None:
    process = child("import time; time.sleep(60)")
    told: list[int] = []
    processes = PoolProcesses(lambda: [process.pid], lambda: told.append(1))
    assert processes.died() == []

    process.send_signal(signal.SIGKILL)

    assert wait_until(processes.died) == [process.pid]
    assert (processes.died(), told) == ([], [1])
    process.wait()


def test_a_busy_process_that_its_pool_has_forgotten_has_died() -> None:
    """It was made, given a task and killed between two looks."""
    process = child()
    process.wait()
    assert PoolProcesses(lambda: []).died({process.pid}) == [process.pid]


def test_this_process_is_no_child_of_its_own() -> None:
    """A solo or threads pool runs tasks in the worker's only process."""
    assert PoolProcesses(lambda: []).died({os.getpid()}) == []

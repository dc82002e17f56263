"""The death of a worker's processes is noticed, whoever reaps them, and however short they lived."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from celery_sidejob.services.heartbeat.pool_processes import ENDS_OF_PLAN, PoolProcesses
from tests.tools.waiting import wait_until


@dataclass
class Listed:
    """A process in the list of its pool."""

    pid: int
    exitcode: int | None = None


def child(code: str = "pass") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", code])


@pytest.mark.parametrize("code", sorted(ENDS_OF_PLAN))
def test_an_end_as_planned_is_no_death_unless_it_was_busy(code: int) -> None:
    process = child(f"import os; os._exit({code})")
    idle, busy = (PoolProcesses(lambda: [Listed(process.pid)]) for _ in range(2))
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert idle.died() == {}
    assert busy.died({process.pid}) == {process.pid: code}
    process.wait()


def test_a_kill_is_noticed_once_and_the_pool_is_told() -> None:
    process = child("import time; time.sleep(60)")
    told: list[int] = []
    processes = PoolProcesses(lambda: [Listed(process.pid)], lambda: told.append(1))
    assert processes.died() == {}

    process.send_signal(signal.SIGKILL)

    wait_until(lambda: processes.died() or told)
    assert processes.died() == {}, "its pool may have something to read that it has written"
    processes.pool_has_looked()
    assert processes.died() == {process.pid: -signal.SIGKILL}
    assert (processes.died(), told) == ({}, [1])
    process.wait()


def test_a_process_with_the_id_of_a_dead_one_is_another() -> None:
    process = child("import os; os._exit(3)")
    listed = [Listed(process.pid)]
    processes = PoolProcesses(lambda: listed)
    assert wait_until(processes.died) == {process.pid: 3}
    process.wait()
    listed = []
    assert processes.died() == {}

    listed = [Listed(process.pid, exitcode=4)]
    assert processes.died() == {process.pid: 4}


def test_a_busy_process_that_its_pool_has_forgotten_has_died() -> None:
    """It was made, given a task and killed between two looks."""
    process = child()
    process.wait()
    assert PoolProcesses(lambda: []).died({process.pid}) == {process.pid: None}, "its exit code is gone"


def test_the_exit_code_of_a_process_that_its_pool_has_reaped_is_asked_of_the_pool() -> None:
    process = child("import os; os._exit(3)")
    listed = [Listed(process.pid)]
    processes = PoolProcesses(lambda: listed)
    listed[0].exitcode = process.wait()
    assert processes.died() == {process.pid: 3}

    other = child("import time; time.sleep(60)")
    listed = [known] = [Listed(other.pid)]
    processes = PoolProcesses(lambda: listed)
    assert processes.died() == {}
    listed = []
    other.kill()
    known.exitcode = other.wait()
    assert processes.died({other.pid}) == {other.pid: -signal.SIGKILL}, "its pool has forgotten it since"


def test_this_process_is_no_child_of_its_own() -> None:
    """A solo or threads pool runs tasks in the worker's only process."""
    assert PoolProcesses(lambda: [Listed(os.getpid())]).died({os.getpid()}) == {}

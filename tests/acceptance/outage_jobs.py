"""Jobs that wait where a test wants them, for tests that stop workers or take servers away meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from celery.exceptions import SoftTimeLimitExceeded

from celery_sidejob import RunningJob, sidejob_task
from tests.tools.recorder import Record

GATES = "SIDEJOB_TEST_GATES"
POLL_S = 0.02
HOLDING_S = 60.0
"""How long a body waits for what its test is to do; it fails then."""


@sidejob_task(name="outage.note")
def note(job: RunningJob, name: str = "") -> None:
    """Note that it ran."""
    Record.from_env().note("ran", job=job.id, run_no=job.run_no, name=name)


@sidejob_task(name="outage.note_once", max_losses=1)
def note_once(job: RunningJob) -> None:
    """Note that it ran. No run of it may be lost, so its process claims it, and no page of its worker."""
    Record.from_env().note("ran", job=job.id, run_no=job.run_no, name="")


@sidejob_task(name="outage.count")
def count(job: RunningJob) -> None:
    """Do next to nothing: for tests with thousands of jobs, which look at the jobs' own rows."""


@sidejob_task(name="outage.hold", inports=["numbers"])
def hold(job: RunningJob, gate: str) -> list[int]:
    """Read all numbers, wait for the gate to be opened, and return what was read."""
    read = list(job.input("numbers"))
    Record.from_env().note("holding", job=job.id, run_no=job.run_no, read=read)
    _wait_at(gate)
    Record.from_env().note("passed", job=job.id, run_no=job.run_no, read=read)
    return read


@hold.on_shutdown
def _note_shutdown(job: RunningJob) -> None:
    Record.from_env().note("shut down", job=job.id, run_no=job.run_no)


@sidejob_task(name="outage.deaf", inports=["numbers"])
def deaf(job: RunningJob, gate: str) -> list[int]:
    """As `hold`, but a soft time limit does not end the waiting."""
    read = list(job.input("numbers"))
    Record.from_env().note("holding", job=job.id, run_no=job.run_no, read=read)
    while True:
        try:
            _wait_at(gate)
        except SoftTimeLimitExceeded:
            Record.from_env().note("warned", job=job.id, run_no=job.run_no)
        else:
            return read


@sidejob_task(name="outage.obey")
def obey(job: RunningJob) -> str:
    """Work until the worker wants to stop."""
    Record.from_env().note("holding", job=job.id, run_no=job.run_no)
    _wait_until(lambda: job.stopping, "the worker to stop")
    Record.from_env().note("stopping", job=job.id, run_no=job.run_no)
    return "stopped by itself"


@sidejob_task(name="outage.swell")
def swell(job: RunningJob, megabytes: int) -> int:
    """Take so much memory that the worker replaces the process."""
    grown = b"x" * (megabytes * 1_000_000)
    Record.from_env().note("ran", job=job.id, run_no=job.run_no, name="swell")
    return len(grown)


def open_gate(directory: Path, gate: str) -> None:
    """Let those pass who wait at the gate, and all who come later."""
    directory.mkdir(exist_ok=True)
    (directory / gate).touch()


def _wait_at(gate: str) -> None:
    path = Path(os.environ[GATES]) / gate
    _wait_until(path.exists, f"the gate {gate!r}")


def _wait_until(there: Callable[[], bool], what: str) -> None:
    """Wait as `tests.tools.waiting` does, but let an exception out that a signal's handler raises in the middle."""
    deadline = time.monotonic() + HOLDING_S
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {HOLDING_S:g} s: {what}")
        time.sleep(POLL_S)

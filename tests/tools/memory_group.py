"""A control group with little memory, in which the kernel kills processes; only where this process may make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from celery_sidejob.services.heartbeat.pool_processes import MOUNTS, kill_counters
from tests.tools.waiting import wait_until

LIMITS = {"memory.events": "memory.max", "memory.oom_control": "memory.limit_in_bytes"}


@contextmanager
def memory_group(limit_mb: int) -> Iterator[Path]:
    """Lend a group below this process' own: a pid that is written into its `cgroup.procs` has this limit."""
    counters = [path for path in kill_counters() if path.name in LIMITS and path.is_file()]
    if not counters:
        pytest.skip(f"NOT TRIED: this machine shows no control group of this process below {MOUNTS}")
    group = counters[0].parent / f"sidejob-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / LIMITS[counters[0].name]).write_text(str(limit_mb << 20))
    except OSError as error:
        pytest.skip(f"NOT TRIED: this process may not make a control group with a limit: {error}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), message="the group to be empty")
        group.rmdir()

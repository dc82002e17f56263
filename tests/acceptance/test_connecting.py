"""`connect_to` under kills: what is on a port has moved to all its targets, or is still there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from celery_sidejob import Job, RunningJob
from tests.acceptance.scene import QUICK, Scene

PACKETS = list(range(20))


def on(job: Job) -> list[list[int]]:
    """What is on the source and on both targets."""
    ports = (job.input("in"), job.output("x"), job.output("y"))
    return [[packet.value for packet in port.peek()] for port in ports]


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_client_is_killed(scene: Scene, side: str) -> None:
    @scene.sidejob.task(name="connecting.idle", inports=["in"], outports=["x", "y"])
    def idle(job: RunningJob) -> None:
        pass

    job = idle.enqueue()
    with scene.sidejob.port_options(notify=False):
        job.input("in").write_many(PACKETS)
    client = scene.processes.start(
        [sys.executable, "-m", "tests.acceptance.connecting", str(job.id)],
        env={**scene.env, "SIDEJOB_CRASH_POINTS": f"connect:{side}-commit=kill"}, name="connecting",
    )  # fmt: skip
    assert client.wait(20) == -9, client.log_tail()
    assert on(job) == ([PACKETS, [], []] if side == "before" else [[], PACKETS, PACKETS])


@pytest.mark.pools("prefork", reason="a process of the pool is killed")
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_run_is_killed_at_its_commit(scene: Scene, tmp_path: Path, side: str) -> None:
    once = tmp_path / "acted"
    scene.worker(SIDEJOB_CRASH_POINTS=f"end:{side}-commit=kill-child", SIDEJOB_CRASH_ONCE=str(once), **QUICK)
    job = scene.hold(*PACKETS, task="connector")
    scene.settle(30)
    assert once.exists()
    assert on(job) == [[], PACKETS, PACKETS]

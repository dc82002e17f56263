"""A lost run says why: in the dead set, in its history, in `show`, in the log and to those who listen."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest

from celery_sidejob.deadset import DeadEntry
from tests.acceptance.scene import Scene
from tests.tools.memory_group import memory_group
from tests.tools.waiting import wait_until
from tests.tools.workers import WorkerProcess

PROCESSES = pytest.mark.pools("prefork", reason="a process of the pool is killed")
KINDS = pytest.mark.parametrize("kind", ["job", "task"])
FACTS = {
    "exit": {"kind": "exited", "exit_code": 3},
    "kill": {"kind": "killed", "signal": "SIGKILL", "out_of_memory": False},
    "crash": {"kind": "killed", "signal": "SIGSEGV"},
    "memory": {"kind": "killed", "signal": "SIGKILL", "out_of_memory": True},
}
WHY = {
    "exit": "process exited with code 3 in the middle of the run",
    "kill": "process killed by SIGKILL, not because memory ran out",
    "crash": "process killed by SIGSEGV",
    "memory": "process killed by SIGKILL, out of memory",
}


def call(scene: Scene, kind: str, how: str) -> Any:
    """Have a run end its process in this way."""
    return scene.enqueue("ender", (how,)) if kind == "job" else scene.app.send_task("acceptance.ender_task", (how,))


def buried(scene: Scene, kind: str) -> DeadEntry:
    """Wait for the entry of the lost run, and check that everything that tells of it says the same."""
    [entry] = wait_until(lambda: list(scene.sidejob.dead), timeout=60, message="the entry of a lost run")
    assert entry.reason == "lost"
    assert entry.loss is not None
    assert entry.error.startswith("WorkerLostError: ")
    assert entry.loss["why"] in entry.error
    if kind == "job":
        [lost] = [one for one in scene.sidejob.get(entry.job_id).history if one.what == "lost"]
        assert lost.detail["message"] in entry.error
        assert dict(entry.loss).items() <= lost.detail.items()
    return entry


def facts_of(loss: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that do not depend on the worker's name."""
    return {name: value for name, value in loss.items() if name not in ("why", "worker", "host", "process")}


def check_process(scene: Scene, worker: WorkerProcess, entry: DeadEntry, how: str) -> None:
    """The entry names the process, its worker and its end, and the log has the same line."""
    [ending] = scene.record.of("ending")
    loss = entry.loss
    assert loss is not None
    assert facts_of(loss) == FACTS[how]
    assert (loss["host"], loss["process"]) == (socket.gethostname(), ending["pid"])
    assert loss["worker"].split(":")[:2] == [socket.gethostname(), str(worker.pid)]
    assert loss["why"] == f"{WHY[how]} (process {ending['pid']} of worker {loss['worker']})"
    worker.wait_for_log(f"was lost with its worker: {loss['why']}")


@PROCESSES
@pytest.mark.few(3)
@KINDS
@pytest.mark.parametrize("how", ["exit", "kill", "crash"])
def test_the_end_of_a_process_is_told(scene: Scene, kind: str, how: str) -> None:
    worker = scene.worker()
    call(scene, kind, how)
    check_process(scene, worker, buried(scene, kind), how)


@PROCESSES
@pytest.mark.few(1)
@KINDS
def test_a_kill_for_want_of_memory_is_told(scene: Scene, kind: str) -> None:
    with memory_group(limit_mb=300) as group:
        worker = scene.worker()
        for pid in worker.group():
            (group / "cgroup.procs").write_text(str(pid))
        call(scene, kind, "memory")
        check_process(scene, worker, buried(scene, kind), "memory")
        worker.kill_group()


@pytest.mark.few(2)
@KINDS
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_death_of_a_worker_is_told_by_another(scene: Scene, kind: str, how: str) -> None:
    worker = scene.worker()
    call(scene, kind, "hold")
    scene.record.wait_for("ending")
    if how == "killed":
        worker.kill_group()
    else:
        worker.freeze()
    other = scene.worker()
    entry = buried(scene, kind)
    worker.kill_group()

    loss = entry.loss
    assert loss is not None
    assert loss["kind"] == {"killed": "disconnected", "frozen": "silent"}[how]
    assert loss["worker"].split(":")[:2] == [socket.gethostname(), str(worker.pid)]
    told = "its connection to Postgres ended" if how == "killed" else "worker silent for"
    assert told in loss["why"]
    assert 0 < loss["silent_s"] < 60
    other.wait_for_log(f"was lost with its worker: {loss['why']}")


@pytest.mark.parametrize("kind", ["job"])
def test_a_body_that_leaves_is_told(scene: Scene, kind: str) -> None:
    """In the process of a worker whose bodies are threads."""
    scene.worker(pool="threads")
    call(scene, kind, "leave")
    loss = buried(scene, kind).loss
    assert loss is not None
    assert facts_of(loss) == {"kind": "left", "cause": "SystemExit(4)"}

"""The file of a worker's heartbeat: new while the heartbeat goes on, old when it has stopped, gone with the worker."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_sidejob import embedded
from celery_sidejob.services.heartbeat.liveness import HeartbeatFile
from tests.tools.databases import prepare_template
from tests.tools.recorder import Record
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

APP = "tests.acceptance.jobs"
AGE_S = 120
Env = Callable[[str], dict[str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat"


@pytest.fixture
def env(file: Path, redis_url: str, record: Record) -> Env:
    """What a worker of a store is given."""

    def make(url: str) -> dict[str, str]:
        return {
            **record.env,
            "BROKER_URL": redis_url,
            "SIDEJOB_DATABASE_URL": url,
            "SIDEJOB_HEARTBEAT_INTERVAL": "0.2",
            "SIDEJOB_HEARTBEAT_FILE": str(file),
        }

    return make


def make_old(file: Path) -> None:
    os.utime(file, (time.time() - AGE_S,) * 2)


def alive(file: Path) -> bool:
    """What the probe of examples/kubernetes asks."""
    return subprocess.run(["sh", "-c", f'test -n "$(find {file} -mmin -1)"'], check=False).returncode == 0


def test_no_probe_sees_the_file_of_an_earlier_worker_renewed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.touch()
    make_old(file)
    seen: list[bool] = []
    unlink = Path.unlink

    def looked_at(path: Path, **how: bool) -> None:
        seen.append(alive(path))
        unlink(path, **how)

    monkeypatch.setattr(Path, "unlink", looked_at)
    HeartbeatFile(str(file), every_s=1.0).clear()
    assert (seen, file.exists()) == ([False], False)


def test_it_is_as_old_as_the_last_heartbeat(env: Env, file: Path, database_url: str, processes: Processes) -> None:
    worker = processes.start_worker(APP, env=env(database_url))
    wait_until(lambda: alive(file), message="the first heartbeat")
    make_old(file)
    wait_until(lambda: alive(file), message="the next heartbeat")

    worker.stop_signal()
    make_old(file)
    assert not alive(file)
    worker.cont()
    wait_until(lambda: alive(file), message="the heartbeat to go on")

    worker.terminate()
    assert worker.wait() == 0
    assert not file.exists()


def test_it_stays_new_while_the_store_is_down(
    env: Env, file: Path, own_postgres: embedded.Postgres, processes: Processes
) -> None:
    prepare_template(own_postgres.url)
    worker = processes.start_worker(APP, env=env(own_postgres.url))
    own_postgres.kill()
    worker.wait_for_log("heartbeat failed")
    for _ in range(3):
        make_old(file)
        wait_until(lambda: alive(file), message="the next try of the heartbeat")


def test_what_a_killed_worker_has_left_is_removed_at_the_start(
    env: Env, file: Path, empty_database_url: str, processes: Processes
) -> None:
    file.touch()
    argv = ["-m", "celery", "-A", APP, "worker", "--pool=solo"]
    worker = processes.start([sys.executable, *argv], env=env(empty_database_url))
    assert worker.wait(30) != 0
    assert "db upgrade" in worker.log()
    assert not file.exists()


def test_it_is_touched_no_more_often_than_it_is_asked_to(file: Path) -> None:
    often, seldom = HeartbeatFile(str(file), every_s=0), HeartbeatFile(str(file), every_s=3600)
    seldom.touch()
    make_old(file)
    seldom.touch()
    assert not alive(file)
    often.touch()
    assert alive(file)


def test_a_file_that_cannot_be_touched_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = HeartbeatFile(str(tmp_path / "gone" / "heartbeat"), every_s=0)
    file.touch()
    file.touch()
    assert len(caplog.records) == 1
    (tmp_path / "gone").mkdir()
    file.touch()
    assert (tmp_path / "gone" / "heartbeat").exists()
    file.remove()
    file.remove()

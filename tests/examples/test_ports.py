"""The example of docs/ports.md: a writer that is faster than its reader, and workers that are killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes, WorkerProcess

pytestmark = KOMBU_5_7

THROUGH = "completed\ncompleted\nTrue 60\nnumbers 10"


class Ports(Shop):
    """`examples/ports`."""

    celery_app = "ports"

    def worker(self, name: str, **env: str) -> WorkerProcess:
        """Start a worker that runs one job at a time: the writer fills the port before its reader runs."""
        return self._processes.start_worker(
            self.celery_app, env={**self.env, **env}, cwd=self.directory, concurrency=1, name=name
        )


@pytest.fixture
def ports(tmp_path: Path, processes: Processes, empty_database_url: str) -> Ports:
    ports = Ports("ports", tmp_path, processes, empty_database_url)
    ports.celery("sidejob", "db", "upgrade")
    return ports


def test_all_numbers_come_through_a_port_that_is_too_small_for_them(ports: Ports) -> None:
    ports.worker("worker")
    assert ports.run("python", "ports.py", "60").strip() == THROUGH
    assert ports.sql("SELECT count(*) FROM sidejob.port_waiters") == [(0,)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "killed_at", ["end:before-commit", "end:after-commit", "checkpoint:after-commit", "mature:before-commit"]
)
def test_a_kill_leaves_no_writer_waiting(ports: Ports, killed_at: str) -> None:
    """The end of a run that found the port full, the commit that made room, the ask of the writer."""
    once = ports.directory / "killed"
    ports.worker("worker", SIDEJOB_CRASH_POINTS=f"{killed_at}=kill-child@2", SIDEJOB_CRASH_ONCE=str(once))
    assert ports.run("python", "ports.py", "60").strip() == THROUGH
    assert once.exists()

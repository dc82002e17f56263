"""The example of docs/units.md: the turns that a run repeats after a kill, and what is there afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes, WorkerProcess

pytestmark = KOMBU_5_7

SQUARES = "CREATE TABLE squares (number int PRIMARY KEY, square int NOT NULL)"


class Units(Shop):
    """`examples/units`."""

    celery_app = "units"

    def do(self, *arguments: str) -> str:
        """Run ``python units.py …``."""
        return self.run("python", "units.py", *arguments).strip()

    def killed_worker(self, kills: str) -> WorkerProcess:
        """Start a worker, one process of whose pool is killed at this point."""
        return self.worker("worker", SIDEJOB_CRASH_POINTS=kills, SIDEJOB_CRASH_ONCE=str(self.directory / "killed"))

    def killed(self) -> bool:
        """Whether the kill has happened."""
        return (self.directory / "killed").exists()


@pytest.fixture
def units(tmp_path: Path, processes: Processes, empty_database_url: str) -> Units:
    units = Units("units", tmp_path, processes, empty_database_url)
    units.celery("sidejob", "db", "upgrade")
    units.sql(SQUARES)
    return units


def turns(worker: WorkerProcess) -> list[int]:
    """The numbers of the turns that were begun, in order."""
    return [int(number) for number in re.findall(r"squaring (-?\d+)", worker.log())]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("task", "killed_at", "begun"),
    [
        ("each_turn", "checkpoint:before-commit=kill-child@3", [1, 2, 3, 3, 4, 5, 6]),
        ("three_turns", "checkpoint:before-commit=kill-child@2", [1, 2, 3, 4, 5, 6, 4, 5, 6]),
        ("in_steps", "checkpoint:after-commit=kill-child@3", [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_kill_repeats_what_is_not_committed(units: Units, task: str, killed_at: str, begun: list[int]) -> None:
    worker = units.killed_worker(killed_at)

    assert units.do(task, "1", "2", "3", "4", "5", "6") == "completed [1, 4, 9, 16, 25, 36]"

    assert units.killed()
    assert turns(worker) == begun


def test_a_kill_keeps_the_rows_and_the_unit_together(units: Units) -> None:
    """The kill comes between the commit of the third turn and whatever the run does next."""
    worker = units.killed_worker("end:before-commit=kill-child")

    assert units.do("with_a_row", "1", "2", "3") == "completed [1, 2, 3]"

    assert units.killed()
    assert units.sql("SELECT * FROM squares ORDER BY number") == [(1, 1), (2, 4), (3, 9)]
    assert turns(worker) == [1, 2, 3], "the run that came after it found nothing left to do"


def test_an_error_leaves_its_turn_on_the_port(units: Units) -> None:
    worker = units.worker("worker")
    assert units.do("each_second", "5") == "completed [25]"

    assert units.do("each_turn", "1", "2", "-3", "4") == "failed [1, 4]"
    assert units.sql("SELECT value FROM sidejob.packets ORDER BY id") == [(-3,), (4,)]
    assert turns(worker) == [5, 1, 2, -3]

    units.celery("sidejob", "dead", "retry", "--all", "--yes")
    wait_until(
        lambda: turns(worker) == [5, 1, 2, -3, -3], message="the run to begin again with the number that it refused"
    )

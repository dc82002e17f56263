"""The example of docs/schedules.md: what is declared is made each second, caught up and run now, without a beat."""

from __future__ import annotations

from pathlib import Path

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


def test_what_is_declared_is_made(tmp_path: Path, processes: Processes, empty_database_url: str) -> None:
    class Schedules(Shop):
        celery_app = "schedules"

    shop = Schedules("schedules", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    processes.start_worker("schedules", env=shop.env, cwd=shop.directory, name="worker")

    assert shop.run("python", "schedules.py").splitlines() == [
        "numbers: 1 2 3",
        "apart: 0:00:01",
        "caught up: reported by fax",
        "now: reported by mail as number 1",
        "next reports on weekdays: True",
    ]
    assert "count" in shop.celery("sidejob", "schedules", "list")

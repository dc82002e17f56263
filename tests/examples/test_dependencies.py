"""The example of docs/dependencies.md: a report waits for its figures, and is sent by the job that has built it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


@pytest.mark.few(1)
@pytest.mark.parametrize("killed_at", [None, "end:after-commit", "look:before-commit"])
def test_the_report_is_sent_once_its_figures_are_there(
    tmp_path: Path, processes: Processes, empty_database_url: str, killed_at: str | None
) -> None:
    """Also if a process of the worker dies after a figure is there, and before it has looked who waits for that."""

    class Report(Shop):
        celery_app = "report"

    shop = Report("dependencies", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    once = shop.directory / "killed"
    crash = {"SIDEJOB_CRASH_POINTS": f"{killed_at}=kill-child", "SIDEJOB_CRASH_ONCE": str(once)} if killed_at else {}
    processes.start_worker(
        "report", env={**shop.env, **crash}, cwd=shop.directory, concurrency=4, name="worker", queues="fetch,build,post"
    )

    printed = shop.run("python", "report.py").splitlines()

    assert printed == [
        "the report waits for dependencies",
        "sent: 14 to the board by report.send",
        "not called off, because 1 other waits for it",
        "called off: True",
    ]
    assert once.exists() == (killed_at is not None)

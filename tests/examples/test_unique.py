"""The example of docs/unique.md: sixteen ask at once, with a worker that is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


SLOW = [pytest.param(point, marks=pytest.mark.slow) for point in (None, "claim:after-commit")]


@pytest.mark.parametrize("killed_at", [*SLOW, "end:before-commit"])
def test_one_job_and_one_task_are_made(
    tmp_path: Path, processes: Processes, empty_database_url: str, killed_at: str | None
) -> None:
    class Unique(Shop):
        celery_app = "unique"

    shop = Unique("unique", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    once = shop.directory / "killed"
    crash = {"SIDEJOB_CRASH_POINTS": f"{killed_at}=kill-child", "SIDEJOB_CRASH_ONCE": str(once)} if killed_at else {}
    processes.start_worker("unique", env={**shop.env, **crash}, cwd=shop.directory, concurrency=1, name="worker")

    printed = shop.run("python", "unique.py").splitlines()

    assert printed == ["1 job, 1 task", "completed", "True completed", "True", "completed terminated"]
    assert once.exists() == (killed_at is not None)
    assert shop.sql("SELECT count(*) FROM sidejob.messages") == [(1,)]

"""The example of docs/capacity.md: sixteen clients of an endpoint that refuses, with a worker that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


@pytest.mark.few(1)
@pytest.mark.parametrize("killed_at", [None, "end:before-commit"])
def test_orders_are_refused_and_all_are_done_in_the_end(
    tmp_path: Path, processes: Processes, empty_database_url: str, killed_at: str | None
) -> None:
    class Overload(Shop):
        celery_app = "overload"

    shop = Overload("overload", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    once = shop.directory / "killed"
    crash = {"SIDEJOB_CRASH_POINTS": f"{killed_at}=kill-child", "SIDEJOB_CRASH_ONCE": str(once)} if killed_at else {}
    processes.start_worker("overload", env={**shop.env, **crash}, cwd=shop.directory, concurrency=2, name="worker")

    printed = shop.run("python", "overload.py").splitlines()

    assert printed == [
        "100 reports, some orders refused: True", "never more than the limit: True", "used: 0, refusals counted: True",
    ]  # fmt: skip
    assert once.exists() == (killed_at is not None)
    assert shop.sql("SELECT count(*) FROM sidejob.messages") == [(0,)]

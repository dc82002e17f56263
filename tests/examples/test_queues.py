"""The example of docs/queues.md: mails wait while the server is down, and the urgent one is sent first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


@pytest.mark.few(1)
@pytest.mark.parametrize("killed_at", [None, "permit:before-commit", "end:before-freed"])
def test_the_urgent_mail_goes_first(
    tmp_path: Path, processes: Processes, empty_database_url: str, killed_at: str | None
) -> None:
    """Also if a process of the worker dies in the midst of a claim, or before it lets the next mail in."""

    class Queues(Shop):
        celery_app = "queues"

    shop = Queues("queues", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    once = shop.directory / "killed"
    crash = {"SIDEJOB_CRASH_POINTS": f"{killed_at}=kill-child", "SIDEJOB_CRASH_ONCE": str(once)} if killed_at else {}
    processes.start_worker("queues", env={**shop.env, **crash}, cwd=shop.directory, concurrency=4, name="worker")

    printed = shop.run("python", "queues.py").splitlines()

    assert printed == [
        "next: the admin reader 0",
        "waits for pause",
        "paused: 11 wait, 0 run",
        "among the first two: the admin",  # two are sent at once, and either is done first
        "limit 2 rate 6000/m",
    ]
    assert once.exists() == (killed_at is not None)
    assert shop.sql("SELECT count(*) FROM sidejob.messages") == [(0,)]

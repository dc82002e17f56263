"""The example of docs/batches.md: an album is published when all its thumbnails are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


@pytest.mark.few(1)
@pytest.mark.parametrize("killed", [False, True])
def test_an_album_is_published_when_its_thumbnails_are_there(
    tmp_path: Path, processes: Processes, empty_database_url: str, killed: bool
) -> None:
    """Also if the worker dies right after it has noted how some have ended: another one makes what follows, once.

    It may die in the middle of runs. They run again, which the durable task's `on_lost` allows.
    """

    class Thumbnails(Shop):
        celery_app = "thumbnails"

    shop = Thumbnails("batches", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    once = shop.directory / "killed"
    crash = {"SIDEJOB_CRASH_POINTS": "batch:after-commit=kill-group", "SIDEJOB_CRASH_ONCE": str(once)} if killed else {}
    for number in range(2 if killed else 1):
        shop.worker(f"worker{number}", **crash)

    printed = shop.run("python", "thumbnails.py").splitlines()

    assert printed == [
        "summer 4 of 4 are done, 0 failed",
        "winter 2 of 3 are done, 1 failed",
        "summer is published",
        "winter has failed",
    ]
    assert once.exists() == killed

"""The example of docs/finding.md: parcels that are found by their tags, followed on their way, and have a history."""

from __future__ import annotations

from pathlib import Path

from tests.examples.shops import Shop
from tests.tools.versions import KOMBU_5_7
from tests.tools.workers import Processes

pytestmark = KOMBU_5_7


def test_parcels_are_found_and_followed(tmp_path: Path, processes: Processes, empty_database_url: str) -> None:
    class Parcels(Shop):
        celery_app = "parcels"

    shop = Parcels("finding", tmp_path, processes, empty_database_url)
    shop.celery("sidejob", "db", "upgrade")
    shop.worker("worker")

    printed = shop.run("python", "parcels.py").splitlines()

    bell = "rang the bell {'at': 'Elm Street 3'}"
    assert [line.rstrip() for line in printed] == [
        "run 1 is running", "run 2 is running", "run 2 is completed",
        "made", "claimed", bell, "retried", "claimed", bell, "completed",
        "failed: Nowhere 1 ['customer:7', 'returned']",
        "{'no such address': 1} [('customer:7', 3), ('delivered', 2), ('express', 1), ('returned', 1)]",
        "its worker is there: True",
    ]  # fmt: skip

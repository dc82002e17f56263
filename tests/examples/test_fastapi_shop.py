"""The FastAPI example as `docs/fastapi.md` says it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import FastApiShop, kill_in_the_middle
from tests.tools.versions import KOMBU_5_7, SQLALCHEMY_2_0_22
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

pytestmark = [KOMBU_5_7, SQLALCHEMY_2_0_22]


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> FastApiShop:
    return FastApiShop("fastapi_shop", tmp_path, processes, empty_database_url)


@pytest.mark.slow
def test_each_order_is_handled_once_whatever_dies(shop: FastApiShop) -> None:
    shop.run("create_tables")
    assert "it is new" in shop.celery("sidejob", "db", "upgrade")
    shop.serve("uvicorn", "orders.main:app", "--port", "0")
    kill_in_the_middle(shop)

    counted = shop.request("POST", "/stocktakings/")["id"]
    shown = {"state": "SUCCESS", "worth": f"{(85 + 38) * 2.5:.2f}"}
    wait_until(
        lambda: shop.request("GET", f"/stocktakings/{counted}/") == shown, timeout=30, message="the stock's worth"
    )


def test_the_shops_own_tests_pass(shop: FastApiShop) -> None:
    own = {"DATABASE_URL": "postgresql://nowhere.invalid/dev", "TEST_DATABASE_URL": shop.database_url}
    assert "5 passed" in shop.run("pytest", "-c", "/dev/null", "--rootdir", ".", **own)

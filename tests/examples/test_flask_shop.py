"""The Flask example as `docs/flask.md` says it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import FlaskShop, kill_in_the_middle
from tests.tools.versions import KOMBU_5_7, SQLALCHEMY_2_0_22
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

pytestmark = [KOMBU_5_7, SQLALCHEMY_2_0_22]


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> FlaskShop:
    return FlaskShop("flask_shop", tmp_path, processes, empty_database_url)


@pytest.mark.few(0)
def test_each_order_is_handled_once_whatever_dies(shop: FlaskShop) -> None:
    shop.run("flask", "--app", "shop", "create-tables")
    assert "it is new" in shop.celery("sidejob", "db", "upgrade")
    shop.serve("flask", "--app", "shop", "run", "--port", "0")
    kill_in_the_middle(shop)


@pytest.mark.slow
def test_what_was_picked_of_a_cancelled_order_is_put_back(shop: FlaskShop) -> None:
    shop.run("flask", "--app", "shop", "create-tables")
    shop.celery("sidejob", "db", "upgrade")
    shop.serve("flask", "--app", "shop", "run", "--port", "0")
    shop.stock(cup=10, kettle=1)
    shop.worker("worker")
    order = shop.place(cup=4, kettle=2)  # more kettles than there are: its job waits for them
    shop.wait_for([order], "suspended")
    shop.request("DELETE", f"/orders/{order}/")
    shop.wait_for([order], "terminated")  # the children that have picked may take a moment longer
    wait_until(lambda: shop.in_stock() == {"cup": 10, "kettle": 1}, timeout=30, message="the cups to be put back")


def test_the_shops_own_tests_pass(shop: FlaskShop) -> None:
    own = {"DATABASE_URL": "postgresql://nowhere.invalid/dev", "TEST_DATABASE_URL": shop.database_url}
    assert "2 passed" in shop.run("pytest", "-c", "/dev/null", "--rootdir", ".", **own)

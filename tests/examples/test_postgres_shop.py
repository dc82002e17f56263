"""The example on Postgres alone, run by the commands that its first lines name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.shops import PostgresShop
from tests.tools.versions import KOMBU_5_7, SQLALCHEMY_2_0_22
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

pytestmark = [KOMBU_5_7, SQLALCHEMY_2_0_22]

QUOTE = "import shop; print(shop.quote.delay([1, 2, 3]).get(timeout=30))"
FAILING = """
import shop

def fail(*args, **kwargs):
    raise RuntimeError

shop.confirm.apply_async = fail  # the last call before the commit
try:
    shop.place_order("ada@example.com", 5)
except RuntimeError:
    print(shop.sidejob.count_jobs())
"""


@pytest.fixture
def shop(tmp_path: Path, processes: Processes, empty_database_url: str) -> PostgresShop:
    shop = PostgresShop("postgres_shop", tmp_path, processes, empty_database_url)
    shop.do("create-tables")
    shop.celery("sidejob", "db", "upgrade")
    return shop


def test_an_order_is_paid_in_parts_and_shipped(shop: PostgresShop) -> None:
    first = shop.worker("first")
    number = shop.do("order", "ada@example.com", "30")
    shop.do("pay", number, "10")
    wait_until(
        lambda: shop.sql("SELECT status FROM sidejob.jobs") == [("suspended",)]
        and shop.do("show", number) == "{'paid': 10, 'confirmed': True, 'shipped': False}",
        timeout=30, message="the first payment to be there, and the job to rest",
    )  # fmt: skip
    first.kill_group()
    shop.do("pay", number, "20")  # nobody works

    shop.worker("second")

    shipped = "{'paid': 30, 'confirmed': True, 'shipped': True}"
    wait_until(lambda: shop.do("show", number) == shipped, timeout=30, message="the order to be shipped")
    assert shop.do("-c", QUOTE) == "6", "a plain task, and its result"
    assert shop.sql("SELECT * FROM sidejob.dead") == []


def test_an_order_that_is_rolled_back_leaves_no_job(shop: PostgresShop) -> None:
    assert shop.do("-c", FAILING) == "{}"
    assert shop.sql("SELECT id FROM orders") == []

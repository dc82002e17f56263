"""The shop's own tests: `python -m pytest`, with TEST_DATABASE_URL naming an empty database of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["DATABASE_URL"] = os.environ["TEST_DATABASE_URL"]  # before the modules of the shop read it

import pytest
from fastapi.testclient import TestClient
from orders.main import app
from orders.models import Model, Product, engine, make_session
from orders.worker import app as celery_app
from orders.worker import sidejob
from sqlalchemy import select


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """A client of the web server, whose jobs run in the process that asks for them."""
    celery_app.conf.update(broker_url="memory://", task_always_eager=True, task_store_eager_result=True)
    Model.metadata.create_all(engine)
    sidejob.upgrade_schema()
    with make_session.begin() as session:
        session.add(Product(name="kettle", price=20, stock=5))
    with TestClient(app) as client:
        yield client


def in_stock() -> int:
    with make_session() as session:
        return session.scalars(select(Product.stock)).one()


@pytest.mark.parametrize("path", ["/orders/", "/async/orders/"])
def test_an_order_is_fulfilled(client: TestClient, path: str) -> None:
    before = in_stock()
    order = client.post(path, json={"email": "ada@example.com", "lines": {"kettle": 2}}).json()["order"]
    assert client.get(f"/orders/{order}/").json() == {"order": order, "job": "completed", "total": "40.00"}
    assert client.get(f"/orders/{order}/receipt/").json() == {"total": "40.00"}
    assert in_stock() == before - 2


@pytest.mark.parametrize("path", ["/orders/", "/async/orders/"])
def test_what_is_not_sold_makes_no_job(client: TestClient, path: str) -> None:
    before = sidejob.count_jobs()
    answer = client.post(path, json={"email": "ada@example.com", "lines": {"teapot": 1}})
    assert (answer.status_code, answer.json()) == (400, {"detail": "not sold here: teapot"})
    assert sidejob.count_jobs() == before


def test_the_stock_is_counted(client: TestClient) -> None:
    counted = client.post("/stocktakings/").json()["id"]
    assert client.get(f"/stocktakings/{counted}/").json() == {"state": "SUCCESS", "worth": f"{20 * in_stock()}.00"}

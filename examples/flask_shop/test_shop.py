"""The shop's own tests: `python -m pytest`, with TEST_DATABASE_URL naming an empty database of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from flask import Flask
from flask.testing import FlaskClient
from shop import create_app
from shop.models import Product, StockMove, session
from sqlalchemy import func, select

DATABASE_URL = os.environ["TEST_DATABASE_URL"]


@pytest.fixture(scope="session")
def app() -> Iterator[Flask]:
    """An application whose jobs run in the process that asks for them."""
    celery = {
        "sidejob_database_url": DATABASE_URL,
        "broker_url": "memory://",
        "result_backend": "sidejobpg://",
        "task_always_eager": True,
        "task_store_eager_result": True,
    }
    app = create_app({"TESTING": True, "DATABASE_URL": DATABASE_URL, "CELERY": celery})
    app.test_cli_runner().invoke(args=["create-tables"])
    app.extensions["sidejob"].upgrade_schema()
    with app.app_context():
        session.add(Product(name="kettle", price=20, stock=5))
        session.commit()
    yield app
    app.extensions["sidejob"].close()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    """A client of the application."""
    return app.test_client()


def test_an_order_is_fulfilled_and_cancelled(app: Flask, client: FlaskClient) -> None:
    order = client.post("/orders/", json={"email": "ada@example.com", "lines": {"kettle": 2}}).get_json()["order"]
    assert client.get(f"/orders/{order}/").get_json() == {"order": order, "job": "completed", "total": "40.00"}
    assert client.get(f"/orders/{order}/receipt/").get_json() == {"total": "40.00"}
    with app.app_context():
        assert session.scalars(select(Product.stock)).one() == 3

    client.delete(f"/orders/{order}/")
    assert client.get(f"/orders/{order}/").get_json()["job"] == "terminated"
    with app.app_context():
        assert session.scalars(select(Product.stock)).one() == 5
        assert session.scalar(select(func.sum(StockMove.quantity))) == 0


def test_what_is_not_sold_makes_no_job(app: Flask, client: FlaskClient) -> None:
    before = app.extensions["sidejob"].count_jobs()
    answer = client.post("/orders/", json={"email": "ada@example.com", "lines": {"teapot": 1}})
    assert (answer.status_code, answer.get_json()) == (400, {"error": "not sold here: teapot"})
    assert app.extensions["sidejob"].count_jobs() == before

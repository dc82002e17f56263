"""`docs/jobs.md` does what it says: its code runs as it is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_sidejob import FINISHED, RunningJob, current_job
from tests.examples.test_guides import blocks
from tests.tools.in_process import Stage
from tests.tools.workers import ROOT

PAGE = ROOT / "docs" / "jobs.md"


class Base(DeclarativeBase):
    __table_args__ = {"schema": "public"}


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]


class Charge(Base):
    __tablename__ = "charges"
    number: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[int]


@pytest.fixture
def engine(stage: Stage) -> Iterator[Engine]:
    """An engine on the store's database, which has the tables of the page."""
    engine = create_engine(stage.database_url.replace("postgresql:", "postgresql+psycopg:"))
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


def run_shown(stage: Stage, containing: str, **names: Any) -> dict[str, Any]:
    """Run the page's block that has this in it, and return its names."""
    (shown,) = (text for text in blocks(PAGE, "python") if containing in text)
    shop = {
        "sidejob_task": stage.sidejob.task, "FINISHED": FINISHED, "Session": Session, "Invoice": Invoice,
        "Charge": Charge, "__name__": "shop", **names,
    }  # fmt: skip
    exec(shown, shop)
    return shop


def test_a_job_is_made_in_the_transaction_of_a_row(stage: Stage, engine: Engine) -> None:
    order = Order()
    run_shown(stage, "def ship(job, order_id)", order=order, create_engine=lambda url: engine)
    ((number,),) = stage.sql("SELECT id FROM public.orders")
    (job,) = stage.sidejob.jobs(task="shop.ship")
    assert job.args == [number]


def test_an_invoice_and_its_receipt_are_written_exactly_once(stage: Stage, engine: Engine) -> None:
    run_shown(stage, "def write_invoices(job)", engine=engine)
    job = stage.sidejob.enqueue("shop.write_invoices")
    job.input("orders").write_many([{"id": number, "total": 10 * number} for number in (1, 2, 3)])
    stage.drain()
    assert stage.sql("SELECT id, total FROM public.invoices ORDER BY id") == [(1, 10), (2, 20), (3, 30)]
    assert (list(job.output("receipts")), len(job.input("orders"))) == ([1, 2, 3], 0)


def test_a_job_that_keeps_its_progress_beside_its_rows_begins_again_behind_them(stage: Stage, engine: Engine) -> None:
    lost: list[int] = []

    def next_accounts(after: int) -> list[int]:
        if after == 200 and not lost:
            lost.append(after)
            raise current_job.retry(countdown=0)
        return list(range(after + 1, min(after + 100, 450) + 1))

    run_shown(stage, "def charge_accounts(job)", engine=engine, next_accounts=next_accounts)
    job = stage.sidejob.enqueue("shop.charge_accounts")
    stage.drain()
    assert (job.refresh().status, lost) == ("completed", [200])
    assert stage.sql("SELECT account FROM public.charges ORDER BY number") == [(n,) for n in range(1, 451)]


def test_a_parent_rests_until_all_of_its_children_have_ended(stage: Stage) -> None:
    def bill_part(job: RunningJob, part: str) -> None:
        if part == "b":
            raise ValueError("no such part")

    stage.task(bill_part, name="shop.bill_part")
    run_shown(stage, "def bill(job, parts)")
    job = stage.sidejob.enqueue("shop.bill", (["a", "b", "c"],))
    stage.drain()
    job = job.refresh()
    assert job.status == "completed"
    assert {name: child.status for name, child in job.children.items()} == {
        "a": "completed", "b": "failed", "c": "completed",
    }  # fmt: skip
    assert job.info["run_no"] > 1, "it rested in between"

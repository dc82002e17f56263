"""A shop on Postgres alone: it is the database, Celery's broker, the store of jobs and the result backend.

createdb shop                                    # or name yours in DATABASE_URL
python shop.py create-tables
celery -A shop sidejob db upgrade
celery -A shop worker

python shop.py order ada@example.com 30          # in another shell; prints the order's number
python shop.py pay 1 10
python shop.py pay 1 20
python shop.py show 1
"""

from __future__ import annotations

import os
import sys
from typing import Any

from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_sidejob import RunningJob, SideJob, sidejob_task

SERVER = os.environ.get("DATABASE_URL", "postgresql:///shop").partition("://")[2]

app = Celery("shop", broker="sidejobpg://", backend="sidejobpg://")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)
engine = create_engine(f"postgresql+psycopg://{SERVER}")


class Base(DeclarativeBase):
    """The shop's own tables."""


class Order(Base):
    """An order, and how much of it is paid."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    price: Mapped[int]
    paid: Mapped[int] = mapped_column(default=0)
    confirmed: Mapped[bool] = mapped_column(default=False)
    shipped: Mapped[bool] = mapped_column(default=False)


@app.task
def quote(prices: list[int]) -> int:
    """Add up prices: a plain task, which Celery may lose or run twice, and here may without harm."""
    return sum(prices)


@app.task(durable=True, on_lost="requeue")
def confirm(order_id: int) -> None:
    """Confirm an order: a durable task. It ends in success or in the dead set, whatever dies."""
    with Session(engine) as session, session.begin():
        session.get_one(Order, order_id).confirmed = True


@sidejob_task(inports=["payments"])
def deliver(job: RunningJob, order_id: int) -> None:
    """Wait for the payments of an order, then ship it: a job. It rests in between, for months if need be."""
    for amount in job.for_inputs("payments"):
        with Session(engine) as session:
            with job.unit(transaction=session):
                order = session.get_one(Order, order_id)
                order.paid += amount
                order.shipped = order.paid >= order.price
            session.commit()  # the payment is added, and taken off the port: together, exactly once
    with Session(engine) as session:
        if not session.get_one(Order, order_id).shipped:
            job.suspend()  # the next payment starts the next run


def place_order(email: str, price: int) -> int:
    """Place an order. Its row, its job and the durable task exist after one commit, or none of them does."""
    with Session(engine) as session, session.begin():
        order = Order(email=email, price=price)
        session.add(order)
        session.flush()  # gives order.id its value
        deliver.enqueue((order.id,), transaction=session, aliases=[f"order-{order.id}"])
        confirm.apply_async((order.id,), transaction=session)
        return order.id


def pay(order_id: int, amount: int) -> None:
    """Give a payment to the job of its order."""
    sidejob.get(f"order-{order_id}").input("payments").write(amount)


def show(order_id: int) -> dict[str, Any]:
    """Return what is known of an order."""
    with Session(engine) as session:
        order = session.get_one(Order, order_id)
        return {"paid": order.paid, "confirmed": order.confirmed, "shipped": order.shipped}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["create-tables"]:
            Base.metadata.create_all(engine)
        case ["order", email, price]:
            print(place_order(email, int(price)))
        case ["pay", order_id, amount]:
            pay(int(order_id), int(amount))
        case ["show", order_id]:
            print(show(int(order_id)))
        case _:
            sys.exit(__doc__)

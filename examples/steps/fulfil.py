"""An order as one function: it is paid, packed and sent, or else everything is undone.

python fulfil.py create-tables
python fulfil.py order 1 30                      # an order that costs 30
python fulfil.py order 2 13                      # nobody packs on a thirteenth: its payment is given back
python fulfil.py sign 1                          # the customer has received it
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, text
from steps import engine, sidejob

from celery_sidejob import NO_DATA, ChildFailedError, JobFailed, RunningJob

TABLES = """
CREATE TABLE IF NOT EXISTS bank (key text PRIMARY KEY, amount int NOT NULL, asked int NOT NULL DEFAULT 1);
CREATE TABLE IF NOT EXISTS invoices (id serial PRIMARY KEY, order_id int NOT NULL, amount int NOT NULL);
"""


@sidejob.task(name="fulfil.order", inports=["signatures"])
def fulfil(job: RunningJob, order: int, price: int) -> str:
    """Go on behind the last finished step, whatever was killed meanwhile."""
    payment = job.step("charge", move_money, f"order {order}", price, retries=5, retry_on=OSError)
    try:
        parcel = job.call("pack", pack, (order, price))  # a job of its own; no worker is held meanwhile
    except ChildFailedError as error:
        job.step("give back", move_money, f"order {order} is given back", -price)
        raise JobFailed("not packed", f"order {order} was not packed: {error}") from error
    job.sleep("cool off", seconds=1)
    signature = job.receive("signatures", timeout=timedelta(days=14))
    with engine.connect() as connection:
        with job.step("invoice", transaction=connection) as step:
            if step.is_new:  # the row and the record are one commit
                step.value = write_invoice(connection, order, price)
        connection.commit()
    signed = "nobody" if signature is NO_DATA else signature
    return f"{parcel}, paid by {payment}, invoice {step.value}, signed by {signed}"


@sidejob.task(name="fulfil.pack")
def pack(job: RunningJob, order: int, price: int) -> str:
    """Pack the parcel."""
    if price == 13:
        raise ValueError("nobody packs on a thirteenth")
    return f"parcel {order}"


def move_money(key: str, amount: int) -> str:
    """Ask the bank, perhaps twice: if the worker is killed before the record, the step is done again.

    The bank is a table here. It knows the key of each payment, as banks do, and moves the money once.
    """
    with engine.begin() as bank:
        bank.execute(
            text("INSERT INTO bank VALUES (:key, :amount) ON CONFLICT (key) DO UPDATE SET asked = bank.asked + 1"),
            {"key": key, "amount": amount},
        )
    return key


def write_invoice(connection: Connection, order: int, amount: int) -> int:
    """Insert the invoice, and return its number."""
    number: int = connection.execute(
        text("INSERT INTO invoices (order_id, amount) VALUES (:order, :amount) RETURNING id"),
        {"order": order, "amount": amount},
    ).scalar_one()
    return number


def main(what: str, *arguments: Any) -> None:
    """Do what the command line says."""
    if what == "create-tables":
        with engine.begin() as connection:
            connection.execute(text(TABLES))
    elif what == "order":
        order, price = map(int, arguments)
        print("job", fulfil.enqueue((order, price), aliases=[f"order-{order}"]).id)
    else:
        sidejob.get(f"order-{arguments[0]}").input("signatures").write("the customer")


if __name__ == "__main__":
    main(*sys.argv[1:])

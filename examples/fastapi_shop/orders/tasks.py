"""What becomes of an order, whatever dies meanwhile. Workers are synchronous, so they use the synchronous session."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from celery_sidejob import RunningJob

from .models import Invoice, Line, Order, Product, StockMove, make_session
from .worker import app, sidejob

RESTOCKED_S = 60


class OutOfStockError(Exception):
    """There are fewer pieces than were ordered."""


@sidejob.task(max_retries=None)
def fulfil(job: RunningJob, order_id: int) -> str:
    """Take each line's pieces out of the stock, and then write the invoice: each in a unit of its own, once."""
    with make_session() as session:
        order = session.get_one(Order, order_id)
        for line in order.lines[job.get("picked", 0) :]:  # an earlier run may have picked some, and died
            try:
                with job.unit(transaction=session):
                    take_from_stock(session, line)
                    job.set(picked=job.get("picked", 0) + 1)
                session.commit()
            except OutOfStockError as error:
                raise job.retry(error, countdown=RESTOCKED_S) from error
        if job.get("invoice") is None:
            with job.unit(transaction=session):
                invoice = Invoice(
                    order_id=order_id, total=sum(line.quantity * line.product.price for line in order.lines)
                )
                session.add(invoice)
                session.flush()
                job.set(invoice=invoice.id)
            session.commit()
        return str(session.get_one(Invoice, job.get("invoice")).total)


@app.task(durable=True, on_lost="requeue")
def take_stock() -> str:
    """Return what all products in the stock are worth: a durable task, which is repeated if its worker dies."""
    with make_session() as session:
        return str(session.scalar(select(func.sum(Product.stock * Product.price))) or 0)


def take_from_stock(session: Session, line: Line) -> None:
    """Take a line's pieces out of the stock."""
    enough = update(Product).where(Product.id == line.product_id, Product.stock >= line.quantity)
    if session.scalar(enough.values(stock=Product.stock - line.quantity).returning(Product.id)) is None:
        raise OutOfStockError(f"{line.product.name} x {line.quantity}")
    session.add(StockMove(line_id=line.id, quantity=line.quantity))

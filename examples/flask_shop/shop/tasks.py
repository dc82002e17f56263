"""What becomes of an order, whatever dies meanwhile."""

from __future__ import annotations

from sqlalchemy import select, update

from celery_sidejob import RunningJob, Status, sidejob_task

from .models import Invoice, Line, Order, Product, StockMove, session

RESTOCKED_S = 60


class OutOfStockError(Exception):
    """There are fewer pieces than were ordered."""


@sidejob_task
def fulfil(job: RunningJob, order_id: int) -> str:
    """When each line was picked by a child of its own, write the invoice, and return its total."""
    if any(child.status != Status.COMPLETED for child in job.children.values()):
        job.suspend()  # each child's end begins the next run
    if job.get("invoice") is not None:  # an earlier run has written it, and died before its end
        return str(session.get_one(Invoice, job.get("invoice")).total)
    with job.unit(transaction=session):
        order = session.get_one(Order, order_id)
        total = sum(line.quantity * line.product.price for line in order.lines)
        invoice = Invoice(order=order, total=total)
        session.add(invoice)
        session.flush()
        job.set(invoice=invoice.id)
    session.commit()
    return str(invoice.total)


@fulfil.on_startup
def divide(job: RunningJob) -> None:
    """Have each line picked by a child."""
    for line_id in session.scalars(select(Line.id).where(Line.order_id == job.args[0])):
        job.enqueue(pick, (line_id,), child_name=f"line-{line_id}")


@sidejob_task(max_retries=None)
def pick(job: RunningJob, line_id: int) -> None:
    """Take a line's pieces out of the stock, once; wait for them if they are not there."""
    if job.get("picked"):
        return  # an earlier run has done it, and died before its end
    try:
        with job.unit(transaction=session):
            take_from_stock(line_id)
            job.set(picked=True)
        session.commit()
    except OutOfStockError as error:
        raise job.retry(error, countdown=RESTOCKED_S) from error


@pick.on_shutdown
def put_back(job: RunningJob) -> None:
    """The order was cancelled: put back what was taken."""
    if job.get("picked"):
        with job.unit(transaction=session):
            line = session.get_one(Line, job.args[0])
            move(line, -line.quantity)
            job.unset("picked")
        session.commit()


def take_from_stock(line_id: int) -> None:
    """Take a line's pieces out of the stock."""
    line = session.get_one(Line, line_id)
    if not move(line, line.quantity):
        raise OutOfStockError(f"{line.product.name} x {line.quantity}")


def move(line: Line, quantity: int) -> bool:
    """Take pieces out of the stock, or put them back if there are less than none; tells whether there were enough."""
    enough = update(Product).where(Product.id == line.product_id, Product.stock >= quantity)
    if session.scalar(enough.values(stock=Product.stock - quantity).returning(Product.id)) is None:
        return False
    session.add(StockMove(line_id=line.id, quantity=quantity))
    return True

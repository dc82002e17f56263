"""The web server: `uvicorn orders.main:app`. Each kind of endpoint asks for work in its own way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from celery.exceptions import TimeoutError as StillRunning
from fastapi import Depends, FastAPI, HTTPException, Response
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from celery_sidejob import Job

from .models import Invoice, Line, Order, Product, async_engine, engine, make_async_session, make_session
from .tasks import fulfil, take_stock
from .worker import sidejob


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Close the connections as the server stops."""
    yield
    await async_engine.dispose()
    engine.dispose()
    sidejob.close()


app = FastAPI(lifespan=lifespan)


def a_session() -> Iterator[Session]:
    """Open the session of one request."""
    with make_session() as session:
        yield session


async def an_async_session() -> AsyncIterator[AsyncSession]:
    """Open the asynchronous session of one request."""
    async with make_async_session() as session:
        yield session


class Wanted(BaseModel):
    """What a customer orders: pieces of each product."""

    email: str
    lines: dict[str, int]


# -- endpoints with `def`: FastAPI runs them in threads, so everything in them may be synchronous ----------------------


@app.post("/orders/", status_code=201)
def place_order(wanted: Wanted, session: Annotated[Session, Depends(a_session)]) -> dict[str, int]:
    """Place an order: its rows and its job, or nothing."""
    products = session.scalars(select(Product).where(Product.name.in_(wanted.lines)))
    order = order_of(wanted, {product.name: product for product in products})
    session.add(order)
    session.flush()  # gives order.id its value
    fulfil.enqueue((order.id,), aliases=[order.job_alias], transaction=session)
    session.commit()
    return {"order": order.id}


@app.get("/orders/{order_id}/")
def show_order(order_id: int, session: Annotated[Session, Depends(a_session)]) -> dict[str, Any]:
    """Show what has become of an order."""
    order = session.get_one(Order, order_id)
    total = session.scalar(select(Invoice.total).where(Invoice.order_id == order_id))
    return {"order": order_id, "job": job_of(order).status, "total": None if total is None else str(total)}


# -- endpoints with `async def`: they await the same verbs -------------------------------------------------------------


@app.post("/async/orders/", status_code=201)
async def place_order_async(
    wanted: Wanted, session: Annotated[AsyncSession, Depends(an_async_session)]
) -> dict[str, int]:
    """Place an order: its rows and its job, or nothing."""
    products = await session.scalars(select(Product).where(Product.name.in_(wanted.lines)))
    order = order_of(wanted, {product.name: product for product in products})
    session.add(order)
    await session.flush()
    await fulfil.aenqueue((order.id,), aliases=[order.job_alias], transaction=session)
    await session.commit()
    return {"order": order.id}


@app.get("/orders/{order_id}/receipt/")
async def show_receipt(order_id: int, response: Response) -> dict[str, str | None]:
    """Show what the job of an order has returned; wait for it, but not for long."""
    job = await sidejob.aio.find(f"order-{order_id}")
    if job is None:
        raise HTTPException(404, "there is no such order")
    try:
        return {"total": await job.result.aget(timeout=10)}
    except StillRunning:
        response.status_code = 202
        return {"total": None}


@app.post("/stocktakings/", status_code=202)
async def begin_stocktaking() -> dict[str, str]:
    """Have the stock counted: a durable task alone, in a transaction of its own."""
    result = await take_stock.adelay()
    return {"id": result.id}


@app.get("/stocktakings/{task_id}/")
async def show_stocktaking(task_id: str) -> dict[str, str | None]:
    """Show how far a stocktaking is, and its result."""
    result = take_stock.AsyncResult(task_id)
    state = await asyncio.to_thread(lambda: result.state)
    return {"state": state, "worth": result.result if state == "SUCCESS" else None}


def order_of(wanted: Wanted, products: Mapping[str, Product]) -> Order:
    """Return a new order of products that were found."""
    if unknown := wanted.lines.keys() - products.keys():
        raise HTTPException(400, f"not sold here: {', '.join(sorted(unknown))}")
    lines = [Line(product=products[name], quantity=quantity) for name, quantity in wanted.lines.items()]
    return Order(email=wanted.email, lines=lines)


def job_of(order: Order) -> Job:
    """Return the job that fulfils an order."""
    return sidejob.get(order.job_alias)

"""Placing an order, looking at it, cancelling it."""

from __future__ import annotations

from celery.exceptions import TimeoutError as StillRunning
from flask import Blueprint, current_app, jsonify, request
from flask.typing import ResponseReturnValue
from sqlalchemy import select

from celery_sidejob import Job

from .models import Line, Order, Product, session
from .tasks import fulfil

blueprint = Blueprint("orders", __name__, url_prefix="/orders")


@blueprint.post("/")
def place_order() -> ResponseReturnValue:
    """Place the order ``{"email": …, "lines": {product: quantity}}``: its rows and its job, or nothing."""
    wanted = request.get_json()
    products = {
        product.name: product for product in session.scalars(select(Product).where(Product.name.in_(wanted["lines"])))
    }
    if unknown := wanted["lines"].keys() - products.keys():
        return jsonify(error=f"not sold here: {', '.join(sorted(unknown))}"), 400
    lines = [Line(product=products[name], quantity=quantity) for name, quantity in wanted["lines"].items()]
    order = Order(email=wanted["email"], lines=lines)
    session.add(order)
    session.flush()  # gives order.id its value
    fulfil.enqueue((order.id,), aliases=[order.job_alias], transaction=session)
    session.commit()
    return jsonify(order=order.id), 201


@blueprint.get("/<int:order_id>/")
def show_order(order_id: int) -> ResponseReturnValue:
    """Show what has become of an order."""
    order = session.get_one(Order, order_id)
    total = str(order.invoices[0].total) if order.invoices else None
    return jsonify(order=order.id, job=job_of(order).status, total=total)


@blueprint.get("/<int:order_id>/receipt/")
def show_receipt(order_id: int) -> ResponseReturnValue:
    """Show what the job of an order has returned; wait for it, but not for long."""
    try:
        return jsonify(total=job_of(session.get_one(Order, order_id)).result.get(timeout=10))
    except StillRunning:
        return jsonify(total=None), 202


@blueprint.delete("/<int:order_id>/")
def cancel_order(order_id: int) -> ResponseReturnValue:
    """Cancel an order: what was picked is put back, by jobs."""
    job_of(session.get_one(Order, order_id)).terminate(recursive=True)
    return jsonify(order=order_id), 202


def job_of(order: Order) -> Job:
    """Return the job that fulfils an order."""
    job: Job = current_app.extensions["sidejob"].get(order.job_alias)
    return job

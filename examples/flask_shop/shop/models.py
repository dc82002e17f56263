"""Products, orders and their lines; what was taken out of the stock, and what was invoiced."""

from __future__ import annotations

from decimal import Decimal

from flask import Flask
from flask.globals import app_ctx
from sqlalchemy import ForeignKey, Numeric, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship, scoped_session, sessionmaker


def context_id() -> int:
    """Return what tells one application context from another."""
    return id(app_ctx._get_current_object())  # type: ignore[attr-defined]  # it is a proxy


make_session = sessionmaker()
session = scoped_session(make_session, scopefunc=context_id)
"""The session of the application's context, in a request and in a job alike, as in Flask-SQLAlchemy."""


class Model(DeclarativeBase):
    """The tables of the shop."""


class Product(Model):
    """Something the shop sells."""

    __tablename__ = "product"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    price: Mapped[Decimal] = mapped_column(Numeric(10, 2))
    stock: Mapped[int]


class Order(Model):
    """What a customer has ordered. The job that fulfils it has the alias `job_alias`."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    lines: Mapped[list[Line]] = relationship(back_populates="order")
    invoices: Mapped[list[Invoice]] = relationship(back_populates="order")

    @property
    def job_alias(self) -> str:
        """By this name `sidejob.get()` and `celery -A make_celery sidejob show` find the order's job."""
        return f"order-{self.id}"


class Line(Model):
    """Some pieces of one product in an order."""

    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    product_id: Mapped[int] = mapped_column(ForeignKey("product.id"))
    quantity: Mapped[int]
    order: Mapped[Order] = relationship(back_populates="lines")
    product: Mapped[Product] = relationship()


class StockMove(Model):
    """Pieces taken out of the stock, or put back; nothing but the job keeps a line from having too many of these."""

    __tablename__ = "stock_move"
    id: Mapped[int] = mapped_column(primary_key=True)
    line_id: Mapped[int] = mapped_column(ForeignKey("line.id"))
    quantity: Mapped[int]


class Invoice(Model):
    """What the customer owes; nothing but the job keeps an order from having two of these."""

    __tablename__ = "invoice"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    total: Mapped[Decimal] = mapped_column(Numeric(12, 2))
    order: Mapped[Order] = relationship(back_populates="invoices")


def init_app(app: Flask) -> None:
    """Bind the session to the application's database; nothing connects before its first use."""
    engine = create_engine(make_url(app.config["DATABASE_URL"]).set(drivername="postgresql+psycopg"))
    make_session.configure(bind=engine)

    @app.teardown_appcontext
    def remove_session(error: BaseException | None) -> None:
        session.remove()

    @app.cli.command("create-tables")
    def create_tables() -> None:
        """Make the tables of the shop; a project has migrations instead."""
        Model.metadata.create_all(engine)

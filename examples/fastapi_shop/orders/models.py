"""Products, orders and their lines; what was taken out of the stock, and what was invoiced."""

from __future__ import annotations

from decimal import Decimal

from sqlalchemy import ForeignKey, Numeric, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship, sessionmaker

from .worker import DATABASE_URL

URL = make_url(DATABASE_URL).set(drivername="postgresql+psycopg")  # psycopg is synchronous and asynchronous
engine = create_engine(URL)
async_engine = create_async_engine(URL)
make_session = sessionmaker(engine, expire_on_commit=False)
make_async_session = async_sessionmaker(async_engine, expire_on_commit=False)


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
    lines: Mapped[list[Line]] = relationship(order_by="Line.id")

    @property
    def job_alias(self) -> str:
        """By this name `sidejob.get()` and `celery -A orders.worker sidejob show` find the order's job."""
        return f"order-{self.id}"


class Line(Model):
    """Some pieces of one product in an order."""

    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    product_id: Mapped[int] = mapped_column(ForeignKey("product.id"))
    quantity: Mapped[int]
    product: Mapped[Product] = relationship()


class StockMove(Model):
    """Pieces taken out of the stock; nothing but the job keeps a line from having two of these."""

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

"""The shops of the examples, as people run them: migrated, served, worked for, and killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psycopg

from celery_sidejob import SideJob
from tests.tools.apps import make_app
from tests.tools.waiting import wait_until
from tests.tools.workers import ROOT, Process, Processes, WorkerProcess

COMMAND_S = 60
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")


class Shop:
    """A copy of an example, on a database and a broker of its own."""

    celery_app: str
    """What `celery -A` is given."""
    product: str
    line: str
    stock_move: str
    invoice: str

    def __init__(
        self, name: str, directory: Path, processes: Processes, database_url: str, broker_url: str | None = None
    ) -> None:
        """Without a URL the broker is the example's own."""
        self.directory = directory / name
        shutil.copytree(ROOT / "examples" / name, self.directory, ignore=LEFT_OUT)
        self.database_url = database_url
        self.env = {
            "DATABASE_URL": database_url,
            **({"CELERY_BROKER_URL": broker_url} if broker_url is not None else {}),
            "SIDEJOB_LOST_AFTER": "2",  # what a killed worker had fetched and not begun
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._processes = processes
        self._address = ""

    @contextmanager
    def client(self) -> Iterator[SideJob]:
        """Lend an app that sees the same store."""
        app = make_app("client", broker="sidejobpg://", sidejob_database_url=self.database_url)
        try:
            yield app.sidejob
        finally:
            app.sidejob.close()
            app.close()

    # -- what a new user does ------------------------------------------------------------------------------------

    def run(self, *argv: str, **env: str) -> str:
        """Run ``python -m …`` in the shop's directory to its end, and return what it printed."""
        done = self.start(*argv, name="command", **env)
        assert done.wait(COMMAND_S) == 0, done.log()
        return done.log()

    @staticmethod
    def python(*argv: str) -> list[str]:
        """Return a command of this Python: ``python …`` and a shell as they are, other programs as ``python -m …``."""
        if argv[0] == "sh":  # finds this Python's programs before others
            return ["env", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}", *argv]
        return [sys.executable, *argv[1:]] if argv[0] == "python" else [sys.executable, "-m", *argv]

    def celery(self, *argv: str, **env: str) -> str:
        """Run a command of Celery."""
        return self.run("celery", "-A", self.celery_app, *argv, **env)

    def serve(self, *argv: str) -> None:
        """Start ``python -m …``, a web server that prints its address."""
        self.served_by(self.start(*argv, name="web"))

    def start(self, *argv: str, name: str, **env: str) -> Process:
        """Start ``python -m …`` in the shop's directory."""
        return self._processes.start(self.python(*argv), env={**self.env, **env}, cwd=self.directory, name=name)

    def served_by(self, server: Process) -> None:
        """Ask this web server from now on, as soon as it has printed its address."""
        self._address = wait_until(lambda: _address(server), timeout=30, message="the server to print its address")

    def worker(self, name: str, *, queues: Sequence[str] = (), **env: str) -> WorkerProcess:
        """Start a worker, of all queues or of these; it is ready when this returns."""
        return self._processes.start_worker(
            self.celery_app, env={**self.env, **env}, cwd=self.directory, concurrency=2, name=name, queues=queues
        )

    def request(self, method: str, path: str, document: Any = None) -> Any:
        """Ask the web server, and return the JSON document of its answer."""
        body = None if document is None else json.dumps(document).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self._address + path, body, headers, method=method), timeout=30) as answer:
            return json.load(answer)

    def text(self, path: str) -> str:
        """Ask the web server for a text."""
        with urlopen(self._address + path, timeout=30) as answer:
            found: str = answer.read().decode()
            return found

    def place(self, *, path: str = "/orders/", **lines: int) -> int:
        """Place an order, and return its number."""
        placed = self.request("POST", path, {"email": "ada@example.com", "lines": lines})
        number: int = placed["order"]
        return number

    def order(self, number: int) -> dict[str, Any]:
        """What the shop says of an order."""
        shown: dict[str, Any] = self.request("GET", f"/orders/{number}/")
        return shown

    # -- what is in the database ---------------------------------------------------------------------------------

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run SQL as the database's owner, and return the rows."""
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            cursor = connection.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def stock(self, **products: int) -> None:
        """Put products on sale."""
        for name, pieces in products.items():
            self.sql(f"INSERT INTO {self.product} (name, price, stock) VALUES (%s, 2.50, %s)", name, pieces)

    def in_stock(self) -> dict[str, int]:
        """How many pieces there are of each product."""
        return dict(self.sql(f"SELECT name, stock FROM {self.product}"))

    @contextmanager
    def locked(self, product: str) -> Iterator[Callable[[], bool]]:
        """Hold the row of a product; within the block tells whether somebody's transaction waits for it."""
        with psycopg.connect(self.database_url) as holder:
            holder.execute(f"SELECT FROM {self.product} WHERE name = %s FOR NO KEY UPDATE", [product])
            pid = holder.info.backend_pid

            def awaited() -> bool:
                return bool(self.sql("SELECT 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))", pid))

            yield awaited

    # -- what must be true ---------------------------------------------------------------------------------------

    def wait_for(self, orders: Sequence[int], status: str) -> None:
        """Wait until the jobs of all these orders are in a status."""
        wait_until(
            lambda: all(self.order(number)["job"] == status for number in orders), timeout=60, interval=0.2,
            message=f"the jobs of {len(orders)} orders to be {status}",
        )  # fmt: skip

    def judge(self, orders: Sequence[int]) -> None:
        """Each line of these orders was taken out of the stock once, and each order has one invoice."""
        moves = self.sql(
            f"SELECT l.id, l.quantity, count(m.*), sum(m.quantity) FROM {self.line} l"
            f" LEFT JOIN {self.stock_move} m ON m.line_id = l.id GROUP BY l.id, l.quantity"
        )
        assert [(number, quantity, 1, quantity) for number, quantity, *_ in moves] == moves
        invoices = self.sql(f"SELECT order_id, total FROM {self.invoice} ORDER BY order_id")
        totals = dict(invoices)
        assert len(invoices) == len(orders)
        assert {number: str(total) for number, total in totals.items()} == {
            number: self.order(number)["total"] for number in orders
        }
        assert self.sql("SELECT * FROM sidejob.dead") == []


class DjangoShop(Shop):
    """`examples/django_shop`."""

    celery_app = "shop"
    product, line = "orders_product", "orders_line"
    stock_move, invoice = "orders_stockmove", "orders_invoice"


class FlaskShop(Shop):
    """`examples/flask_shop`."""

    celery_app = "make_celery"
    product, line, stock_move, invoice = "product", "line", "stock_move", "invoice"


class FastApiShop(Shop):
    """`examples/fastapi_shop`, where orders are placed in turns by its two kinds of endpoints."""

    celery_app = "orders.worker"
    product, line, stock_move, invoice = "product", "line", "stock_move", "invoice"
    _asynchronous = False

    def place(self, *, path: str = "", **lines: int) -> int:
        """Place an order, and return its number."""
        self._asynchronous = not self._asynchronous
        return super().place(path=path or ("/async/orders/" if self._asynchronous else "/orders/"), **lines)


class PostgresShop(Shop):
    """`examples/postgres_shop`, which has no web server."""

    celery_app = "shop"

    def do(self, *arguments: str, **env: str) -> str:
        """Run ``python shop.py …``, or a program that is given as text."""
        return self.run("python", *(arguments if arguments[0] == "-c" else ("shop.py", *arguments)), **env).strip()


def kill_in_the_middle(shop: Shop) -> None:
    """Kill a worker while its transaction waits for a row; another worker does what is left, and nothing twice."""
    shop.stock(cup=100, kettle=50)
    doomed = shop.worker("doomed")
    done = [shop.place(cup=1) for _ in range(3)]
    shop.wait_for(done, "completed")
    with shop.locked("kettle") as awaited:
        begun = [shop.place(cup=2, kettle=1) for _ in range(6)]
        wait_until(awaited, timeout=30, message="a job to wait for the row of the kettle")
        doomed.kill_group()
    later = [shop.place(kettle=2) for _ in range(3)]  # nobody works, and orders are taken all the same
    assert {shop.order(number)["total"] for number in begun + later} == {None}

    shop.worker("second")
    shop.wait_for(begun + later, "completed")

    for number in done + begun + later:  # the last may have come a moment after the end of its job
        assert shop.request("GET", f"/orders/{number}/receipt/") == {"total": shop.order(number)["total"]}
    shop.judge(done + begun + later)
    assert shop.in_stock() == {"cup": 100 - 3 - 2 * 6, "kettle": 50 - 6 - 2 * 3}
    lost = shop.sql("SELECT count(*) FROM sidejob.jobs WHERE run_no > 1 AND args::text <> '[]'")
    assert lost[0][0] > 0
    shown = json.loads(shop.celery("sidejob", "show", f"order-{begun[0]}", "--json"))
    assert shown["status"] == "completed"


def _address(server: Process) -> str | None:
    found = re.search(r"http://127\.0\.0\.1:\d*[1-9]\d*", server.log())
    return found[0] if found else None

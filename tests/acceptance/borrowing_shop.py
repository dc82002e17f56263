"""A client that lends its transactions, and the store and the broker as others see them."""

from __future__ import annotations

from typing import Any

import psycopg
import redis
from celery import Celery

from celery_sidejob import Job, RunningJob, SideJob, Status
from tests.acceptance.lenders import Lender
from tests.tools.pgbouncer import direct
from tests.tools.waiting import wait_until

HOOK_S = 1.5
"""A hook dispatches at once; nothing else in this process would, and a sweeper not before two seconds."""


class Rolled(Exception):
    """Raised to roll a block back."""


class Shop:
    """A client with its app, the store and the broker as they are seen by others."""

    def __init__(self, database_url: str, broker_url: str, **app_options: Any) -> None:
        self.url = database_url
        self.app = Celery("shop", broker=broker_url, backend=broker_url, set_as_current=False, **app_options)
        self.app.conf.sidejob_database_url = database_url
        self.sidejob = SideJob(self.app)
        self.broker = redis.Redis.from_url(broker_url)
        self.outside = psycopg.connect(direct(database_url), autocommit=True)
        self.outside.execute("DROP TABLE IF EXISTS orders")
        self.outside.execute("CREATE TABLE orders (id int PRIMARY KEY, same int)")

        @self.sidejob.task(name="shop.add", inports=["a", "b"], outports=["sum"])
        def add(job: RunningJob, scale: int = 1) -> None:
            for a, b in job.for_inputs("a", "b"):
                job.output("sum").write(scale * (a + b))

        @self.sidejob.task(name="shop.listen", inports={"news": {"channels": ["/news"]}})
        def listen(job: RunningJob) -> None:
            job.suspend()

        self.add, self.listen = add, listen

    def close(self) -> None:
        for table in ("timers", "messages", "jobs", "workers"):
            self.outside.execute(f"DELETE FROM sidejob.{table}")
        self.outside.close()
        self.broker.close()
        self.sidejob.close()
        self.app.close()

    def orders(self) -> list[int]:
        """The caller's rows that everybody can see."""
        return [row[0] for row in self.outside.execute("SELECT id FROM orders ORDER BY id")]

    def count(self, table: str) -> int:
        """How many rows of ours everybody can see."""
        return self.outside.execute(f"SELECT count(*) FROM sidejob.{table}").fetchone()[0]  # type: ignore[index]

    def rung(self) -> int:
        """How many messages the broker has."""
        return int(self.broker.llen("celery"))

    def wait_rung(self, lender: Lender, count: int = 1) -> None:
        """Wait until the broker has what follows a commit, by the hook or, where there is none, by a sweep."""
        if lender.tells_of_commits:
            wait_until(lambda: self.rung() == count, timeout=HOOK_S, message="the commit's hook to publish")
        else:
            assert self.rung() == 0
            wait_until(lambda: self.sidejob.poll() and self.rung() == count, message="the sweeper to publish")

    def follow(self, lender: Lender) -> None:
        """Have done what follows a commit where nobody tells us of it."""
        if not lender.tells_of_commits:
            self.sidejob.poll()

    def completed(self) -> Job:
        """A job that rests as completed."""
        job: Job = self.add.apply().job
        assert job.refresh().status == Status.COMPLETED
        return job

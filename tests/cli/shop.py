"""A Celery app with sidejob tasks, for the tests of the commands."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, SideJob

app = Celery("shop", broker=os.environ.get("BROKER_URL"), set_as_current=False)
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=False,
    sidejob_database_url=os.environ.get("DATABASE_URL"),
)
sidejob = SideJob(app)


@sidejob.task(name="shop.order", inports={"items": {"default": None, "channels": ["/orders"]}}, outports=["receipts"])
def order(job: RunningJob, customer: str = "", **details: object) -> None:
    """Be there to be looked at."""


@sidejob.task(name="shop.pay")
def pay(job: RunningJob, amount: int) -> None:
    """Fail: nobody here has money."""
    raise ValueError(f"no money: {amount}")

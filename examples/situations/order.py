"""Situation 3: an order that waits for weeks."""

from __future__ import annotations

import sys

from situations import app, sidejob

from celery_sidejob import NO_DATA, JobFailed, RunningJob

WEEK_S = 7 * 24 * 3600
REMINDERS = 3


@sidejob.task(name="order.follow", inports=["payments"])
def follow(job: RunningJob, order: int) -> str:
    """Wait for the payment of an order; remind the customer every week, and give up after the third reminder."""
    if job.get("paid") or job.input("payments").read() is not NO_DATA:
        job.set(paid=True)
        return f"order {order} is paid"
    reminded = job.get("reminded")  # None: no run has committed yet; the first one may have been killed
    if reminded == REMINDERS:
        raise JobFailed("not paid", f"order {order} was not paid in {REMINDERS + 1} weeks")
    if reminded is not None:
        remind.delay(order)  # a durable task, which belongs to the same commit
    job.set(reminded=0 if reminded is None else reminded + 1)
    job.suspend(timeout=WEEK_S)  # until a payment, or for a week; no worker is busy meanwhile


@app.task(name="order.remind", durable=True)
def remind(order: int) -> None:
    """Send the reminder."""


if __name__ == "__main__":
    if sys.argv[1] == "new":
        follow.enqueue((int(sys.argv[2]),), aliases=[f"order-{sys.argv[2]}"])
    else:  # the payment has come, months later perhaps, in another process
        sidejob.get(f"order-{sys.argv[2]}").input("payments").write({"amount": sys.argv[3]})

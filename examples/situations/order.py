"""Situation 3: an order that waits for weeks."""

from __future__ import annotations

import sys
from datetime import timedelta

from situations import app, sidejob

from celery_sidejob import NO_DATA, JobFailed, RunningJob

WEEK = timedelta(weeks=1)
REMINDERS = 3


@sidejob.task(name="order.follow", inports=["payments"])
def follow(job: RunningJob, order: int) -> str:
    """Wait for the payment of an order; remind the customer every week, and give up after the third reminder."""
    for number in range(REMINDERS + 1):
        if job.receive("payments", timeout=WEEK) is not NO_DATA:  # no worker is busy meanwhile
            return f"order {order} is paid"
        if number < REMINDERS:
            job.step("remind", send_reminder, order)
    raise JobFailed("not paid", f"order {order} was not paid in {REMINDERS + 1} weeks")


def send_reminder(order: int) -> None:
    """Call a durable task, in the commit of the step."""
    remind.delay(order)


@app.task(name="order.remind", durable=True)
def remind(order: int) -> None:
    """Send the reminder."""


if __name__ == "__main__":
    if sys.argv[1] == "new":
        follow.enqueue((int(sys.argv[2]),), aliases=[f"order-{sys.argv[2]}"])
    else:  # the payment has come, months later perhaps, in another process
        sidejob.get(f"order-{sys.argv[2]}").input("payments").write({"amount": sys.argv[3]})

"""Situation 1: a task that must not be lost."""

from __future__ import annotations

import json
import sys
from urllib.request import Request, urlopen

from situations import app


@app.task(
    name="webhook.notify", durable=True, on_lost="requeue",
    autoretry_for=(OSError,), retry_backoff=True, max_retries=10,
)  # fmt: skip
def notify(url: str, order: int) -> None:
    """Tell a partner about an order, perhaps twice: the partner recognises the order by its number."""
    body = json.dumps({"order": order}).encode()
    request = Request(url, data=body, headers={"Content-Type": "application/json"})
    urlopen(request, timeout=10).close()  # what urlopen raises is an OSError, and the task is tried again


if __name__ == "__main__":
    notify.delay(sys.argv[1], int(sys.argv[2]))  # when this returns, the task is in Postgres

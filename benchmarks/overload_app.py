"""An app whose tasks take BODY_S seconds and note how long each call has waited; for `overload.py`.

With DATABASE_URL the task is durable, and has slots of a capacity pool of LIMIT. Without it, it is plain Celery, and
nothing of this package is imported.
"""

from __future__ import annotations

import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

app = Celery("overload", broker=os.environ["BROKER_URL"])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)
_options: dict[str, Any] = {}
if "DATABASE_URL" in os.environ:
    from celery_sidejob import CapacityPool, SideJob

    app.conf.sidejob_database_url = os.environ["DATABASE_URL"]
    SideJob(app)
    _options = {"durable": True, "capacity": CapacityPool("overload", int(os.environ["LIMIT"]))}
_waits = os.open(os.environ["WAITS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.task(name="served", **_options)
def served(called_at: float) -> None:
    """Work, and note the seconds since the call: one write, which does not mix with others'."""
    time.sleep(float(os.environ["BODY_S"]))
    os.write(_waits, struct.pack("d", time.time() - called_at))


def call(rate: float, seconds: float, threads: int) -> int:
    """Call at this rate, each thread at fixed times, also when the calls before were refused; returns how many."""
    begun = time.monotonic() + 0.5

    def client(number: int) -> int:
        done = 0
        while (due := begun + (done + number / threads) * threads / rate) < begun + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() > begun + seconds:
                break
            done += 1
            with suppress(OperationalError):  # `Overloaded` is one: a caller of plain Celery is prepared for it
                served.delay(time.time())
        return done

    with ThreadPoolExecutor(threads) as clients:
        return sum(clients.map(client, range(threads)))

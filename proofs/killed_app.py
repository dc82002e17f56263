"""An app whose tasks take a millisecond and note that they ran; for workers that are killed (`kills.py`, `deaths/`).

Plain Celery, with the transport and nothing else of this package.
"""

from __future__ import annotations

import json
import os
import time

from celery import Celery

import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known

app = Celery("killed", broker=os.environ["BROKER_URL"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late="EARLY" not in os.environ,
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=False,
    broker_transport_options={"delivery_limit": None},
)
app.conf.update(json.loads(os.environ.get("SETTINGS", "{}")))
_ran = os.open(os.environ["RAN"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.task(name="ran")
def ran(number: int) -> None:
    """Note the number: one write, which outlives a kill and does not mix with others'."""
    time.sleep(0.001)
    os.write(_ran, b"%9d\n" % number)


@app.task(name="begun")
def begun(number: int) -> None:
    """Note the number, which worker begins it, and when."""
    os.write(_ran, b"%9d %d %.6f\n" % (number, os.getsid(0), time.time()))
    time.sleep(0.001)


app.task(name="begun_early", acks_late=False)(begun.run)

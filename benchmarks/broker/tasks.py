"""The app of these benchmarks: plain Celery, whose task notes by whom and when it was begun."""

from __future__ import annotations

import os
import time

from celery import Celery

import celery_sidejob.transport  # noqa: F401  # makes sidejobpg:// known

app = Celery("noted", broker=os.environ["BROKER_URL"])
app.conf.update(task_ignore_result=True)
_noted = os.open(os.environ["NOTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@app.task(name="noted")
def noted() -> None:
    """Note the worker's session and the time: one write, which does not mix with others'."""
    os.write(_noted, b"%d %.6f\n" % (os.getsid(0), time.time()))

"""An app that still has sidejob tasks, and no SideJob any more."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, sidejob_task
from tests.tools.brokers import Broker

app = Celery("observed")
if "BROKER_URL" in os.environ:
    app.conf.update(Broker.from_env().configuration)
app.conf.task_default_queue = "observed"


@sidejob_task(name="observed.work")
def work(job: RunningJob) -> None:
    """Never run here."""


@app.task(name="observed.plain")
def plain() -> str:
    """Run as ever."""
    return "done"


@app.task(name="observed.ask")
def ask() -> str:
    """Say what comes of asking for a job."""
    try:
        work.delay()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

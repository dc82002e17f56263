"""An app of which a deployment has taken a task away: only workers with KNOWS=1 know it."""

from __future__ import annotations

import os

from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

app = Celery("acceptance")
app.conf.update(Broker.from_env().configuration)
app.conf.update(task_default_queue="acceptance", broker_connection_retry_on_startup=True)
sidejob = SideJob(app)


@sidejob.task(name="deployed.stays")
def stays(job: RunningJob) -> None:
    """Known to all workers."""
    Record.from_env().note("stays", job=job.id)


if os.environ.get("KNOWS"):

    @sidejob.task(name="deployed.vanishes")
    def vanishes(job: RunningJob) -> str:
        """Taken away, and brought back."""
        Record.from_env().note("vanishes", job=job.id)
        return "done"

    @vanishes.on_shutdown
    def _(job: RunningJob) -> None:
        Record.from_env().note("shutdown", job=job.id)

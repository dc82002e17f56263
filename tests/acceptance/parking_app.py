"""An app of two deployments: the environment names the tasks of this one."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker
from tests.tools.recorder import Record

app = Celery("parking", set_as_current=False)
app.conf.update(Broker.from_env().configuration)
app.conf.task_default_queue = "parking"
app.conf.sidejob_lost_after = 3
app.conf.sidejob_durable_tasks = ["plain.*"]
app.conf.accept_content = os.environ.get("PARKING_READS", "json").split(",")
sidejob = SideJob(app)


def _serve(name: str) -> None:
    @sidejob.task(name=name)
    def task(job: RunningJob) -> str:
        Record.from_env().note("ran", job=job.id, name=name)
        return name

    @task.on_shutdown
    def _(job: RunningJob) -> None:
        Record.from_env().note("shut down", job=job.id, name=name)


def _serve_plain(name: str) -> None:
    @app.task(name=name, bind=True)
    def task(self: Any, value: Any) -> Any:
        Record.from_env().note("ran", id=self.request.id, name=name)
        return str(value)


for known in os.environ["PARKING_KNOWS"].split(","):
    (_serve_plain if known.startswith("plain.") else _serve)(known)

"""The app of `wiring`: jobs that enter each packet into a table and hand it on, both in one transaction."""

from __future__ import annotations

import os
from typing import Any

import psycopg
from celery import Celery

from celery_sidejob import RunningJob, SideJob
from tests.tools.brokers import Broker

BATCH = 10
"""Packets of a unit, of jobs that read many at once."""
ENTRY = "INSERT INTO entries (job, run, packet) SELECT %s, %s, unnest(%s::bigint[])"

app = Celery("wired")
app.conf.update(Broker.from_env().configuration)
app.conf.update(
    task_default_queue="wired",
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)
sidejob = SideJob(app)


@sidejob.task(name="wired.node", inports=["in"], outports=["out"])
def node(job: RunningJob, following: int | None, many: bool) -> None:
    """Enter what comes, and write it to the input port of the `following` job, or to the own output port."""
    onward: Any = job.output("out") if following is None else sidejob.get(following).input("in")
    with psycopg.connect(os.environ["SIDEJOB_DATABASE_URL"], prepare_threshold=None) as connection:

        def enter(packets: list[int]) -> None:
            connection.execute(ENTRY, [job.id, job.run_no, packets])
            onward.write_many(packets)

        if not many:
            for packet in job.for_inputs("in"):
                with job.unit(transaction=connection):
                    enter([packet])
                connection.commit()
        while many:
            with job.unit(transaction=connection):
                packets = job.input("in").read_many(BATCH)
                enter(packets)
            connection.commit()
            many = len(packets) == BATCH

"""A task that says when its body ran: eight bytes in a file, the same with and without us.

For `durable.py` and `transport.py`. With DATABASE_URL the app is one of ours, with its store in SCHEMA: the task is
durable, there is a job that does the same, and in the schema of that name the task may be repeated. Without a database
it is plain Celery, and nothing of this package is imported but the transport, if the broker's URL says so; with
ONE_CLIENT it is plain but for the one Redis client that workers of ours keep. TRANSPORT_OPTIONS are those of its
broker, as JSON.
"""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery, bootsteps

from benchmarks.note import note

SCHEMA = "sidejob"
REQUEUE_SCHEMA = "requeue"
JOBS_SCHEMA = "jobs"
"""Where durable tasks are as they come, those that may be repeated, and jobs."""


def app_of_environment() -> Celery:
    """Make the app that the environment of this process describes."""
    environment = os.environ
    return make_app(
        environment["BROKER_URL"], environment.get("DATABASE_URL"), schema=environment.get("SCHEMA"),
        transport_options=json.loads(environment.get("TRANSPORT_OPTIONS", "{}")),
    )  # fmt: skip


def make_app(
    broker_url: str, database_url: str | None, *, schema: str | None = SCHEMA,
    transport_options: dict[str, Any] | None = None,
) -> Celery:  # fmt: skip
    """Make an app with the task `stamp`."""
    app = Celery("stamps", broker=broker_url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)
    app.conf.broker_transport_options = transport_options or {}
    if database_url is not None:
        from celery_sidejob import SideJob

        app.conf.sidejob_database_url = database_url
        app.conf.sidejob_schema = schema
        sidejob = SideJob(app)

        @sidejob.task(name="job", shared=False)
        def job(job: Any) -> None:
            """Note the instant."""
            note()

        @sidejob.task(name="hand_on", shared=False, inports=["packets"])
        def hand_on(job: Any, after: int | None, commit_every: int) -> None:
            """Write each packet to the job after this one, and rest; the last job notes the instant of each."""
            target = None if after is None else sidejob.get(after).input("packets")
            for value in job.for_inputs("packets", commit_every=commit_every):
                if target is None:
                    note()
                else:
                    target.write(value)
            job.suspend()

    elif broker_url.startswith("sidejob"):
        import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known

    options = {"on_lost": "requeue"} if schema == REQUEUE_SCHEMA else {}

    @app.task(name="stamp", shared=False, **({} if database_url is None else {"durable": True, **options}))
    def stamp() -> None:
        """Note the instant."""
        note()

    @app.task(name="second", shared=False)
    def second() -> None:
        """Call the last task."""
        stamp.delay()

    @app.task(name="first", shared=False)
    def first() -> None:
        """Call the second task of three."""
        second.delay()

    return app


class OneClient(bootsteps.StartStopStep):
    """Has a plain worker keep its Redis client as ours do."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        """The connection was just opened."""
        from celery_sidejob.hooks.patches.connections import keep_client

        keep_client(c.task_consumer.channel)


if "STAMPS" in os.environ:  # a worker
    app = app_of_environment()
    if "ONE_CLIENT" in os.environ:
        app.steps["consumer"].add(OneClient)

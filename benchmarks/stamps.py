"""A task that says when its body ran: eight bytes in a file, the same with and without us.

For `durable.py` and `transport.py`. With DATABASE_URL the app is one of ours, and the task is durable; with LOCKS_LATE
it locks late, and its store has a schema of that name. Without a database it is plain Celery, and nothing of this
package is imported but the transport, if the broker's URL says so; with ONE_CLIENT it is plain but for the one Redis
client that workers of ours keep.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from celery import Celery, bootsteps

LATE_SCHEMA = "late"


def make_app(broker_url: str, database_url: str | None, *, locks_late: bool = False) -> Celery:
    """Make an app with the task `stamp`."""
    app = Celery("stamps", broker=broker_url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=False)
    if database_url is not None:
        from celery_sidejob import SideJob

        app.conf.sidejob_database_url = database_url
        if locks_late:
            app.conf.sidejob_schema = LATE_SCHEMA
        sidejob = SideJob(app)

        @sidejob.task(name="job", shared=False)
        def job(job: Any) -> None:
            """Do nothing: `enqueue.py` only makes such jobs."""

    elif broker_url.startswith("sidejob"):
        import celery_sidejob.transport  # noqa: F401  # makes sidejob:// known

    late = {"locks_late": True, "on_lost": "requeue"} if locks_late else {}

    @app.task(name="stamp", shared=False, **({} if database_url is None else {"durable": True, **late}))
    def stamp() -> None:
        """Note the instant: one write, so that no two mix."""
        os.write(_file(), struct.pack("q", time.monotonic_ns()))

    return app


class OneClient(bootsteps.StartStopStep):
    """Has a plain worker keep its Redis client as ours do."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, c: Any) -> None:
        """The connection was just opened."""
        from celery_sidejob.hooks.patches.redis_client import keep_client

        keep_client(c.task_consumer.channel)


def _file() -> int:
    pid = os.getpid()
    if pid not in _files:
        _files[pid] = os.open(os.environ["STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return _files[pid]


_files: dict[int, int] = {}

if "STAMPS" in os.environ:  # a worker
    app = make_app(os.environ["BROKER_URL"], os.environ.get("DATABASE_URL"), locks_late="LOCKS_LATE" in os.environ)
    if "ONE_CLIENT" in os.environ:
        app.steps["consumer"].add(OneClient)

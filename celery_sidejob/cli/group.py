"""The command group that Celery finds by the entry point `celery.commands`.

It is imported by every `celery` command, before there is an app: nothing here may read configuration or connect.
"""

from __future__ import annotations

import click

from ..hooks.patches import pools
from .asking import delete, enqueue, run, terminate
from .batches import batches
from .database import db
from .dead import dead
from .finding import tag, tags, track, tracked, untag, untrack
from .jobs import fork, jobs, steps, tree, watch
from .ports import peek, take, write
from .queues import pause, queues, resume, unmanage, workers
from .schedules import schedules
from .show import show
from .stats import stats
from .tasks import revoke, tasks
from .transport import transport
from .upkeep import doctor, drain, poll
from .web import web


@click.group()
def sidejob() -> None:
    """Inspect durable jobs and their store, and act on them."""


for _command in (
    jobs, show, tree, watch, enqueue, write, peek, take, run, terminate, delete, steps, fork, tasks, revoke, queues,
    pause, resume, unmanage, schedules, batches, tags, tag, untag, tracked, track, untrack, workers, poll, stats,
    doctor, drain, dead, db, transport, web,
):  # fmt: skip
    sidejob.add_command(_command)

pools.name_asyncio()  # Celery has read its command `worker` by now

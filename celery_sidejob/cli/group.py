"""The command group that Celery finds by the entry point `celery.commands`.

It is imported by every `celery` command, before there is an app: nothing here may read configuration or connect.
"""

from __future__ import annotations

import click

from .asking import run, terminate
from .batches import batches
from .database import db
from .dead import dead
from .delete import delete
from .doctor import doctor
from .drain import drain
from .enqueue import enqueue
from .finding import tag, tags, track, tracked, untag, untrack
from .jobs import jobs
from .poll import poll
from .ports import peek, take, write
from .queues import pause, queues, resume, unmanage
from .revoke import revoke
from .schedules import schedules
from .show import show
from .stats import stats
from .tasks import tasks
from .transport import transport
from .tree import tree
from .watch import watch
from .workers import workers


@click.group()
def sidejob() -> None:
    """Inspect durable jobs and their store, and act on them."""


for _command in (
    jobs, show, tree, watch, enqueue, write, peek, take, run, terminate, delete, tasks, revoke, queues, pause, resume,
    unmanage, schedules, batches, tags, tag, untag, tracked, track, untrack, workers, poll, stats, doctor, drain, dead,
    db, transport,
):  # fmt: skip
    sidejob.add_command(_command)

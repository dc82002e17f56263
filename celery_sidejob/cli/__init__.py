"""`celery -A app sidejob …`: the commands, which Celery finds by the entry point `celery.commands`.

Every `celery` command imports them, before there is an app: nothing here may read configuration or connect.
"""

from ..hooks.patches import pools
from . import asking, dead, jobs, ports, queues, schedules, show, stats, tasks, transport, upkeep, web  # noqa: F401
from .command import commands as sidejob

__all__ = ["sidejob"]

pools.name_asyncio()  # Celery has read its command `worker` by now

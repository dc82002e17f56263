"""A process that is forked has nothing of its parent's connections, and keeps nothing of theirs alive."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from celery_sidejob.store import workers
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until
from tests.tools.workers import Processes

PROGRAM = """
import os, sys, time
from contextlib import suppress
from celery_sidejob.store import workers
from celery_sidejob.store.connection.connections import Connections

url, schema = sys.argv[1:]
holder = Connections(url, schema).connect()
worker_id = workers.register(holder, "holder")
assert workers.take_lock(holder, worker_id, schema)
workers.announce_lock(holder, worker_id, True)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print("held", worker_id, child, flush=True)
time.sleep(60)
"""


def test_the_lock_of_a_holder_that_has_forked_is_free_when_it_is_killed(stage: Stage, processes: Processes) -> None:
    holder = processes.start_python(PROGRAM, stage.database_url, SCHEMA)
    holder.wait_for_log("held", timeout=30)
    worker_id, child = map(int, holder.log().split("held ")[1].split()[:2])

    def is_free() -> bool:
        found = workers.liveness(stage.runtime.connections, schema=SCHEMA, silence_s=1000)
        return next(row.lock_free for row in found if row.id == worker_id)

    assert not is_free()
    holder.kill()
    try:
        wait_until(is_free, message="the lock to fall")
        os.kill(child, 0)  # it lives
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

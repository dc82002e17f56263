"""`TaskPool.flush` drops what a pool of processes has not begun, when the connection to the broker broke."""

from __future__ import annotations

import inspect
import subprocess
import sys

from celery.concurrency.asynpool import AsynPool
from celery.concurrency.solo import TaskPool
from celery.worker.consumer import Consumer

from celery_sidejob.hooks.patches import pools

RUNNING = """
import os
from celery import Celery
from celery.concurrency.prefork import TaskPool
from celery_sidejob.hooks.patches import pools
from kombu.asynchronous import Hub, set_event_loop

hub = Hub()
set_event_loop(hub)
gate, opening = os.pipe()
app = Celery("processes", set_as_current=False)
pool = TaskPool(1, app=app, threads=False, initargs=(app, "here"))
pool.start()
pool.register_with_event_loop(hub)
pools.remember_runs(pool)
accepted, ended = [], []
pool.apply_async(os.read, (gate, 1), accept_callback=lambda *how: accepted.append(how), callback=ended.append)
while not accepted:
    hub.run_once()
pool.flush()
os.write(opening, b"x")
while not ended:
    hub.run_once()
print(ended)
pool.terminate()
"""


def test_the_pool_hears_of_the_end_of_what_ran_meanwhile() -> None:
    assert list(inspect.signature(AsynPool.flush).parameters) == ["self"]
    assert "self.pool.flush()" in inspect.getsource(Consumer.on_close)

    done = subprocess.run([sys.executable, "-c", RUNNING], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout == "[b'x']\n"


def test_a_pool_without_processes_is_left_alone() -> None:
    pool = TaskPool()

    pools.remember_runs(pool)

    assert "flush" not in vars(pool)

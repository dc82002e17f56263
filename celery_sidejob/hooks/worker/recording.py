"""Has each process of a worker store what it counts: the parent when it is ready, a pool's process at its first run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, signals

from ...operations.runtime import Runtime
from ...services.loop import Loop
from ...services.recorder import Recorder, Served
from ...store.measured import MeasuredConnections

_lock = threading.Lock()
_loops: dict[tuple[int, int], Loop] = {}
"""The loops of this process, by process and app; a forked one finds only entries that are not its own."""


def begin(app: Any, consumer: Any = None) -> None:
    """Begin to record here, once; in a worker's parent also what its `consumer` listens to."""
    key = (os.getpid(), id(app))
    if key in _loops:
        return
    with _lock:
        connections = app.sidejob.runtime.connections
        if key in _loops or not isinstance(connections, MeasuredConnections):
            return
        pool = getattr(consumer, "pool", None)
        loop = Loop(Recorder(connections, lambda: _served(app, consumer), lambda: getattr(pool, "stood", None)))
        _loops.clear()
        _loops[key] = loop
    loop.start()


@contextmanager
def counting(runtime: Runtime) -> Iterator[None]:
    """Count what the block does, and store it, also in a process that is no worker's."""
    connections = runtime.connections
    assert isinstance(connections, MeasuredConnections)
    begun = connections.measures.begun
    connections.measures.begin()
    try:
        yield
    finally:
        connections.record()
        if not begun:  # nobody here stores what comes later
            connections.measures.end()


def end(**_: Any) -> None:
    """Store what is left, and stop."""
    for (pid, _app), loop in list(_loops.items()):
        if pid == os.getpid():
            loop.stop()
    _loops.clear()


def install() -> None:
    """Listen to what Celery tells of a worker's life."""
    signals.worker_ready.connect(_ready, weak=False, dispatch_uid="celery_sidejob.recording.ready")
    signals.worker_shutdown.connect(end, weak=False, dispatch_uid="celery_sidejob.recording.shutdown")
    signals.worker_process_shutdown.connect(end, weak=False, dispatch_uid="celery_sidejob.recording.process")


def _ready(sender: Any = None, **_: Any) -> None:
    app: Celery = sender.app
    sidejob = getattr(app, "sidejob", None)
    if sidejob is not None and sidejob.settings.database_url is not None:
        begin(app, sender)


def _served(app: Any, consumer: Any) -> Served | None:
    """Return this worker's identity, the queues it takes messages from now, and the tasks it knows; None: not known."""
    heartbeat = app.sidejob.heartbeat
    listening = getattr(consumer, "task_consumer", None)
    if heartbeat is None or listening is None:
        return None
    return heartbeat.worker_id, sorted(queue.name for queue in listening.queues), sorted(app.tasks)

"""Bodies in the worker's own process (solo, threads, gevent): what cuts them off there ends no process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from billiard.exceptions import TimeLimitExceeded
from celery import Celery
from celery.app.task import Context
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.worker import state

from ...pools.body import CutOff, TimeUp
from ...services.heartbeat.deliveries import Deliveries
from ...services.heartbeat.heartbeat import Heartbeat
from .pool_process import worker_is_stopping


def is_to_stop(app: Celery, key: tuple[Any, int], *, place: int = 0) -> bool:
    """Whether a body should come to its end: its worker stops, or its run was ended or lost, as far as is known here.

    A body in a thread cannot be stopped from outside; it can only look.
    """
    runs = runs_beside(app, key, place)
    return worker_is_stopping() or (runs is not None and runs.is_over(key))


def is_left(app: Celery, key: tuple[Any, int], error: BaseException, *, place: int = 0) -> bool:
    """Whether the body has left its process, by `sys.exit()` for one, which yet goes on and gives nothing back.

    Not if the worker made it leave, because it stops or the run was revoked: then the worker sees to the run.
    """
    runs = runs_beside(app, key, place)
    if runs is None or worker_is_stopping() or isinstance(error, WorkerShutdown | WorkerTerminate):
        return False
    unasked = runs.plan_of(key) is None and not runs.is_over(key)
    return unasked and (isinstance(error, SystemExit) or is_kill(error))


def ident(app: Celery, *, place: int = 0) -> str | None:
    """Return the name of the worker whose bodies run in this process, in the store at this place."""
    heartbeat = _heartbeat(app, place)
    return None if heartbeat is None else heartbeat.ident


def is_revoked(app: Celery, task_id: str | None) -> bool:
    """Whether the asking was revoked while its delivery waited for a thread, where Celery no longer looks."""
    return _heartbeat(app) is not None and task_id in state.revoked


def is_kill(error: BaseException) -> bool:
    """Whether somebody kills this greenlet, or cancels this coroutine for good."""
    return (isinstance(error, CutOff) and not isinstance(error, TimeUp)) or _is_a(error, "greenlet", "GreenletExit")


def limit(error: BaseException, app: Celery, task: Any, request: Context) -> TimeLimitExceeded | None:
    """Return the hard time limit that has struck, if `error` is how a pool without processes tells a body of it."""
    if isinstance(error, TimeUp):
        return TimeLimitExceeded(error.seconds)
    if not _is_a(error, "gevent.timeout", "Timeout"):
        return None
    seconds = (request.timelimit or (None, None))[0] or task.time_limit or app.conf.task_time_limit
    return TimeLimitExceeded(seconds) if seconds and error.seconds == seconds else None  # type: ignore[attr-defined]


def runs_beside(app: Celery, key: tuple[Any, int], place: int = 0) -> Deliveries[Any] | None:
    """Return the runs that this worker knows in one store, if bodies run beside its heartbeat, not in other processes.

    They are of the kind of this run, whose key has a job's number or a task's id.
    """
    heartbeat = _heartbeat(app, place)
    if heartbeat is None:
        return None
    return heartbeat.tasks.runs if isinstance(key[0], str) else heartbeat.runs


def _heartbeat(app: Celery, place: int = 0) -> Heartbeat | None:
    """Return this worker's heartbeat in one store, if bodies run beside it."""
    found: Sequence[Heartbeat] = app.sidejob.heartbeats
    return None if not found or found[0].has_processes else found[place]


def _is_a(error: BaseException, module: str, name: str) -> bool:
    """`isinstance`, without importing what may not be installed."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(error).__mro__)

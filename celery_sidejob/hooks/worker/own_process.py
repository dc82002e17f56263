"""Bodies in the worker's own process (solo, threads, gevent): what cuts them off there ends no process."""

from __future__ import annotations

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
    runs = _runs(app, key, place)
    return worker_is_stopping() or (runs is not None and runs.is_over(key))


def is_left(app: Celery, key: tuple[Any, int], error: BaseException, *, place: int = 0) -> bool:
    """Whether the body has left its process, by `sys.exit()` for one, which yet goes on and gives nothing back.

    Not if the worker made it leave, because it stops or the run was revoked: then the worker sees to the run.
    """
    runs = _runs(app, key, place)
    if runs is None or worker_is_stopping() or isinstance(error, WorkerShutdown | WorkerTerminate):
        return False
    unasked = runs.plan_of(key) is None and not runs.is_over(key)
    return unasked and (isinstance(error, SystemExit) or is_kill(error))


def ident(app: Celery, *, place: int = 0) -> str | None:
    """Return the name of the worker whose bodies run in this process, in the store at this place."""
    if _heartbeat(app) is None:
        return None
    heartbeat: Heartbeat = app.sidejob.heartbeats[place]
    return heartbeat.ident


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


def runs_beside(app: Celery) -> Deliveries[Any] | None:
    """Return the runs of jobs that this worker knows, if bodies run beside its heartbeat, not in other processes."""
    heartbeat = _heartbeat(app)
    return None if heartbeat is None else heartbeat.runs


def _heartbeat(app: Celery) -> Heartbeat | None:
    """Return this worker's heartbeat, if bodies run beside it."""
    found: Heartbeat | None = app.sidejob.heartbeat
    return None if found is None or found.has_processes else found


def _runs(app: Celery, key: tuple[Any, int], place: int) -> Deliveries[Any] | None:
    """Return what runs here of the kind of a run's key, a job's number or a task's id, and of one store."""
    if _heartbeat(app) is None:
        return None
    heartbeat: Heartbeat = app.sidejob.heartbeats[place]
    return heartbeat.tasks.runs if isinstance(key[0], str) else heartbeat.runs


def _is_a(error: BaseException, module: str, name: str) -> bool:
    """`isinstance`, without importing what may not be installed."""
    return any((kind.__module__, kind.__name__) == (module, name) for kind in type(error).__mro__)

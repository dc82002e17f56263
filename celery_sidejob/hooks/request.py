"""A delivery of a job in the worker's parent process: tells the worker what runs here, and decides nothing itself.

The parent's own view of a lost process or a time limit is not the job's outcome: the child's commit or the rescue is.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.concurrency.solo import TaskPool as Solo
from celery.exceptions import WorkerTerminate
from celery.platforms import EX_OK
from celery.worker.request import Request
from celery.worker.state import active_requests, requests, task_ready

from ..model.messages import is_readable
from ..services.runs_here import ENDED, RELEASED, Delivery, Key
from ..services.stopped_runs import end_from_outside
from .events import Rested
from .publishing import HEADER
from .run import WORKER

logger = logging.getLogger("celery_sidejob")


class JobRequest(Request):
    """Celery's request, for messages of jobs."""

    _solo_is_busy = False
    """Whether the one process of a solo worker is running a job."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap methods that Celery's generated subclass redefines, so that an override here is never called."""
        super().__init_subclass__(**kwargs)
        execute = cls.__dict__.get("execute_using_pool")
        if execute is not None:

            def execute_one_at_a_time(self: JobRequest, pool: Any, **options: Any) -> Any:
                if not isinstance(pool, Solo):
                    return execute(self, pool, **options)
                if JobRequest._solo_is_busy:
                    return self._give_back()
                JobRequest._solo_is_busy = True
                try:
                    return execute(self, pool, **options)
                finally:
                    JobRequest._solo_is_busy = False

            cls.execute_using_pool = execute_one_at_a_time
        on_success = cls.__dict__.get("on_success")
        if on_success is not None:

            def on_success_then_over(self: JobRequest, *args: Any, **options: Any) -> Any:
                try:
                    return on_success(self, *args, **options)
                finally:
                    self._over()

            cls.on_success = on_success_then_over

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        header = self._request_dict.get(HEADER)
        self._key: Key | None = (header["job"], header["for_run"]) if header and is_readable(header) else None
        if self._key is None:  # of a client without this package: it shows the arguments themselves
            self._argsrepr: str = self._redacted(self._argsrepr)
            self._kwargsrepr: str = self._redacted(self._kwargsrepr)
        heartbeat = self._heartbeat
        self._is_being_accepted = False
        self._delivery: Delivery[Key] | None = None
        if heartbeat is not None and self._key is not None:
            self._delivery = heartbeat.runs.received(self._key, getattr(self._task, "lease", None), request=self)

    @property
    def request_dict(self) -> dict[str, Any]:
        """What the pool's process is given: with the identity under which this worker claims just now."""
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat.may_claim:
            self._request_dict[WORKER] = heartbeat.worker_id
        given: dict[str, Any] = self._request_dict
        return given

    def send_event(self, type: str, **fields: Any) -> None:
        """Send a monitoring event, without what is not to be shown."""
        shown = {key: self._redacted(fields[key]) for key in ("exception", "traceback") if fields.get(key)}
        super().send_event(type, **{**fields, **shown})

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        """Note which process runs it."""
        if self._heartbeat is not None and self._delivery is not None:
            # gevent gives the greenlet's number, which is no process
            self._heartbeat.runs.accepted(self._delivery, pid if self._heartbeat.has_processes else os.getpid())
        self._is_being_accepted = True
        try:
            super().on_accepted(pid, time_accepted)
        finally:
            self._is_being_accepted = False

    def acknowledge(self) -> None:
        """Acknowledge early, as the store holds the job; late, once it does, where the message is all there is yet."""
        if self._key is not None or not self._is_being_accepted:
            super().acknowledge()

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A hard limit ends the run as failed, by the worker: its process is about to be killed."""
        if not soft and self._key is None:
            return  # `on_failure` has given it back
        if not soft:
            self._plan(ENDED)
            self._end_from_outside("TimeLimitExceeded", f"The run took longer than {timeout} seconds.", "failed")
        super().on_timeout(soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Revoked while it runs: the death of its process is then no loss.

        Celery finds one request of this task id; if that is a copy which only waits, the one that runs is meant.
        Solo and threads cannot stop a body: there the asking ends all the same, and what the body commits is refused.
        """
        self._plan(ENDED)
        if self in active_requests:
            try:
                super().terminate(pool, signal)
            except NotImplementedError:
                self._announce_revoked("terminated", True, signal, False)
            return
        running = self._running_copies()
        for request in running:
            request.terminate(pool, signal)
        if not running:
            super().terminate(pool, signal)

    def cancel(self, pool: Any, *args: Any, **options: Any) -> None:
        """Cut off by a cold stop: the death of its process is then no loss.

        Where bodies run in the worker's own process, the whole worker ends now, and gives back what it holds. Solo and
        threads cannot stop a task; with gevent Celery would wait for bodies that do not heed it.
        """
        self._plan(RELEASED)
        if self._heartbeat is None or self._heartbeat.has_processes:
            super().cancel(pool, *args, **options)
            return
        with suppress(NotImplementedError):
            for request in list(active_requests):
                pool.terminate_job(request.worker_pid)
        raise WorkerTerminate(EX_OK)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """A lost process is rescued by the heartbeat; everything else was settled by the process itself."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, Rested):
            self.send_event(error.event)
        if self._key is None:
            return self._on_adopted(error, exc_info, send_failed_event, return_ok)
        if isinstance(error, WorkerLostError | SystemExit | KeyboardInterrupt):
            if self._heartbeat is not None and not self._heartbeat.has_processes:
                self._over()  # no process was lost: Celery calls so whatever is no Exception
            task_ready(self)
            self.acknowledge()
            if self._delivery is not None and self._delivery.pid is None:
                self._over()  # its process died before it began: it waits here no longer, and nobody may vouch for it
            if send_failed_event:
                self.send_event("task-failed", exception=repr(error), traceback=None)
            return None
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if not isinstance(error, TimeLimitExceeded | Terminated):  # those are ended from outside
                self._over()

    def _on_adopted(self, error: BaseException, exc_info: Any, *how: Any) -> Any:
        """The message became a job, or cannot; if the process died nobody knows, so it is delivered again.

        A time limit is meant for the body, so one that strikes before there is a job loses nothing either.
        """
        if isinstance(error, WorkerLostError | TimeLimitExceeded):
            logger.warning("Message %s is no job yet and goes back to the broker: %s", self.id, error)
            task_ready(self)
            self.reject(requeue=True)
            return None
        try:
            return super().on_failure(exc_info, *how)
        finally:
            if not isinstance(error, SystemExit | KeyboardInterrupt | Terminated):
                self.acknowledge()  # if that is not done yet

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Revoking ends this one asking as failed; later askings of the job run."""
        if self._key is not None:
            self._end_from_outside("TaskRevokedError", f"The asking was revoked ({reason}).", "revoked")
        super()._announce_revoked(reason, terminated, signum, expired)

    def _end_from_outside(self, kind: str, message: str, reason: str) -> None:
        heartbeat = self._heartbeat
        if heartbeat is not None and self._key is not None:
            key = self._key

            def end() -> None:
                end_from_outside(heartbeat, key, kind, message, reason)
                heartbeat.runs.stopped(key)  # a body that goes on, as in a thread, is told once it can no longer commit

            heartbeat.errands.soon(end)
            if heartbeat.has_processes:
                heartbeat.runs.stopped(key)

    def _plan(self, plan: str) -> None:
        if self._heartbeat is not None and self._key is not None:
            self._heartbeat.runs.planned(self._key, plan)

    def _give_back(self) -> None:
        """Return a message that must not be begun here now.

        A cold stop asks RabbitMQ, in the midst of a solo worker's run, to send nothing more. What it has sent already
        is received while Celery waits for the answer, and would run to its end within the other run.
        """
        task_ready(self)
        self._over()
        self.reject(requeue=True)

    def _over(self) -> None:
        if self._heartbeat is not None and self._delivery is not None:
            self._heartbeat.runs.over(self._delivery)
        for request in self._running_copies():  # Celery has forgotten the task id, and with it the one that still runs
            requests.setdefault(request.id, request)

    def _running_copies(self) -> list[JobRequest]:
        """Return other deliveries of this asking that a process of the pool works on."""
        return [
            request
            for request in list(active_requests)
            if isinstance(request, JobRequest) and request is not self and request.id == self.id
        ]

    def _redacted(self, value: Any) -> Any:
        sidejob = getattr(self._app, "sidejob", None)
        return value if sidejob is None else sidejob.settings.redacted(value)

    @property
    def _heartbeat(self) -> Any:
        return getattr(getattr(self._app, "sidejob", None), "heartbeat", None)

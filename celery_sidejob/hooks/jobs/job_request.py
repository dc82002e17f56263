"""A delivery of a job in the worker's parent process: it tells the worker what runs here, and decides nothing.

The job's outcome is the child's commit or the rescue, and not the parent's own view of a lost process or a time limit.
"""

from __future__ import annotations

from contextlib import suppress
from signal import SIGKILL
from typing import Any

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.control import control_command
from celery.worker.state import active_requests, requests, task_ready

from ...model.durable import HELD, WORKER
from ...model.logger import logger
from ...model.messages import is_readable, why_no_doorbell
from ...operations.runs.run_pages import Claimed, RunKey
from ...services.heartbeat.deliveries import ENDED
from ...services.heartbeat.run_ends import QuietEnd, Stop, end_from_outside
from ...store.claims import Owed
from ...store.results import Ended
from ..events import Rested
from ..messages.doorbell import HEADER
from ..worker.delivered import Delivered, is_busy


class JobRequest(Delivered):
    """Celery's request, for messages of jobs."""

    _header = (HEADER, why_no_doorbell)
    _is_killed = False
    """Whether `kill` has ended its run: Celery would revoke the job that its message names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        header = self._request_dict.get(HEADER)
        self.held: Claimed | None = None
        self._named: RunKey | None = (header["job"], header["for_run"]) if header and is_readable(header) else None
        if self._named is None:  # from a client without this package: it shows the arguments themselves
            self._argsrepr: str = self._redacted(self._argsrepr)
            self._kwargsrepr: str = self._redacted(self._kwargsrepr)
        else:
            self.expires = None  # the row has the expiry of the asking, and its run checks it
        heartbeat = self._heartbeat
        if heartbeat is not None and self._named is not None:
            lease_s = getattr(self._task, "lease", None)
            self._deliveries = ((heartbeat.runs, heartbeat.runs.received(self._named, lease_s, request=self)),)

    @property
    def _has_row(self) -> bool:
        return self._named is not None

    @property
    def _key(self) -> RunKey | None:
        """Its run; in a managed queue this may be another run than the run that its message names."""
        if not self._deliveries:
            return self._named
        self._heartbeat.note_board()
        key: RunKey = self._deliveries[0][1].key
        return key

    @property
    def fresh(self) -> Owed | None:
        """The run to claim for it before it waits for the pool; None if its process claims a run."""
        heartbeat = self._heartbeat
        if self.held is not None or self._named is None or getattr(self._task, "lease", None) is not None:
            return None
        if heartbeat is None or not heartbeat.may_claim or self._has_gate(heartbeat):
            return None
        return Owed(*self._named, self._type)

    def hold(self, held: Claimed) -> None:
        """Note that this worker has claimed its run."""
        self.held = held
        for _, delivery in self._deliveries:
            delivery.held = held

    def unhold(self) -> None:
        """Give its run back, if this worker has claimed the run and it will not begin."""
        for runs, delivery in self._deliveries:
            if (held := runs.let_go(delivery)) is not None:
                self._heartbeat.jobs.unhold(held)

    @property
    def request_dict(self) -> dict[str, Any]:
        """The request for the pool's process, with the run if this worker has claimed it."""
        given = super().request_dict
        if self.held is not None and self.held.worker_id == given.get(WORKER):
            # Without a beat for a lease this worker may have been declared dead, and the run may belong to another
            # worker.
            given[HELD] = self.held._replace(stands=self._heartbeat.may_claim)
        return given

    def end(self, over: Ended) -> None:
        """End the run, as its process has left only that to this worker."""
        assert self.held is not None
        self._heartbeat.jobs.ends.add(QuietEnd(over, self.held.hold), waits=is_busy())

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """At a hard limit the worker ends the run as failed: its process is about to be killed."""
        if not soft and self._named is None:
            return  # `on_failure` has given it back
        if not soft:
            self._plan(ENDED)
            stop = Stop("TimeLimitExceeded", f"The run took longer than {timeout} seconds.")
            self._end_from_outside(stop, self._key)
        super().on_timeout(soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End a run that is revoked; the death of its process is then no loss.

        Celery finds one request of this task id; if that is a waiting copy, the running request is meant. Solo and
        threads cannot stop a body: there the asking ends all the same, and the body's commits are refused. In a managed
        queue its process may work on another job, which then goes on.
        """
        if self in active_requests and self._key != self._named:
            self._announce_revoked("terminated", True, signal, False)
            return
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

    def kill(self, pool: Any) -> None:
        """Kill the process of its run; the run's asking fails."""
        key = self._key
        self._is_killed = True
        self._plan(ENDED)
        with suppress(NotImplementedError):  # solo and threads
            pool.terminate_job(self.worker_pid, SIGKILL)
        self._end_from_outside(Stop("TaskRevokedError", "The run was killed by a command.", "revoked"), key)
        if not self._heartbeat.has_processes:  # Celery does not learn of the end
            task_ready(self)
            self.acknowledge()

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Leave a lost process to the heartbeat, which rescues its run; the process itself has settled the rest."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, Rested):
            self.send_event(error.event)
        if self._named is None:
            return self._on_adopted(error, exc_info, send_failed_event, return_ok)
        if isinstance(error, WorkerLostError | SystemExit | KeyboardInterrupt) or self._is_killed:
            if self._heartbeat is not None and not self._heartbeat.has_processes:
                self.over()  # no process was lost: Celery's name for anything that is no Exception
            task_ready(self)
            self.acknowledge()
            if any(delivery.pid is None for _, delivery in self._deliveries):
                self.over()  # its process died before it began: it no longer waits here, and no worker may vouch for it
            if send_failed_event:
                self.send_event("task-failed", exception=repr(error), traceback=None)
            return None
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            if not isinstance(error, TimeLimitExceeded | Terminated):  # the others are ended from outside
                self.over()

    def _on_adopted(self, error: BaseException, exc_info: Any, *how: Any) -> Any:
        """The message became a job, or cannot become one; if the process died, this is unknown: it is delivered again.

        A time limit is meant for the body, so a limit that strikes before there is a job loses nothing either.
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
        """Revoking ends this asking as failed; later askings of the job run."""
        if self._named is not None:
            stop = Stop("TaskRevokedError", f"The asking was revoked ({reason}).", "revoked")
            self._end_from_outside(stop, self._named)
        super()._announce_revoked(reason, terminated, signum, expired)

    def _end_from_outside(self, stop: Stop, key: RunKey | None) -> None:
        heartbeat = self._heartbeat
        if heartbeat is not None and key is not None:
            named = self._type if key == self._named else None

            def end() -> None:
                end_from_outside(heartbeat.runtime, key, named, stop, worker_id=heartbeat.worker_id)
                heartbeat.runs.stopped(key)  # a body that goes on, as in a thread, learns of it too late to commit

            heartbeat.errands.soon(end)
            if heartbeat.has_processes:
                heartbeat.runs.stopped(key)

    def over(self) -> None:
        """Note that this delivery is finished without effect; another delivery of the same asking may go on."""
        super().over()
        for request in self._running_copies():  # Celery has forgotten the task id, and so the delivery that still runs
            requests.setdefault(request.id, request)

    def _running_copies(self) -> list[JobRequest]:
        """Return other deliveries of this asking that a process of the pool executes."""
        return [
            request
            for request in list(active_requests)
            if isinstance(request, JobRequest) and request is not self and request.id == self.id
        ]


@control_command(name="sidejob_kill_run", args=[("job_id", int), ("run_no", int)])
def kill_run(state: Any, job_id: int, run_no: int, **_: Any) -> None:
    """Kill the process of a job's run, if this worker executes it, by whatever message."""
    for request in list(active_requests):
        if isinstance(request, JobRequest) and request._key == (job_id, run_no):
            request.kill(state.consumer.pool)

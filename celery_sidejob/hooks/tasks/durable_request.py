"""A delivery of an ordinary durable task in the worker's parent process.

Unlike for a job, Celery's own view of a failed task counts here, except for a lost process: the heartbeat rescues its
run, and its row decides once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals
from celery.exceptions import Ignore, Reject, Retry
from celery.worker.state import revoked, task_ready

from ...model import durable
from ...model.logger import logger
from ...model.names import text_of
from ...model.protocols import Rider
from ...services.heartbeat.deliveries import ENDED
from ...services.heartbeat.run_ends import QuietEnd
from ...store.outbox.holds import Fresh
from ...store.results import Ended
from ..messages.kept_message import content_of, received
from ..task_options import REQUEUE
from ..worker.delivered import Delivered, is_busy
from ..worker.received import holders
from . import results
from .durable_run import Copy, Forged, Left
from .present import RUNS


def install() -> None:
    """Listen to Celery's signal of received messages; a second call has no effect."""
    signals.task_received.connect(_received, weak=False, dispatch_uid="celery_sidejob.durable")


def _received(request: Any = None, **_: Any) -> None:
    """Note the content that a task which is not durable here runs, if its publisher has made a row."""
    given = request.request_dict
    if durable.HEADER in given and not isinstance(request, DurableRequest):
        given[durable.DIGEST] = durable.Digest(content_of(request.message).digest)


class DurableRequest(Delivered):
    """Celery's request, for messages of durable tasks."""

    _header = (durable.HEADER, durable.why_no_header)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        header = self._request_dict.get(durable.HEADER)
        self._kept: durable.Key | None = durable.key_of(self.id, header)
        self._key: durable.Key = self._kept or (self.id, 1)
        self._address = durable.Address.of(header)
        # For `inspect`, events and logs.
        self._argsrepr: str = self._redacted(self._argsrepr)
        self._kwargsrepr: str = self._redacted(self._kwargsrepr)
        self._failed = False
        self.held: durable.HeldRun | None = None
        self._holders = holders(self._app, header)
        self._deliveries = [
            (heartbeat.tasks.runs, heartbeat.tasks.runs.received(self._key, request=self))
            for heartbeat in self._holders
        ]
        if (fetched := getattr(self._message, "held", None)) is not None:
            self.hold(fetched)

    @property
    def _has_row(self) -> bool:
        return self._kept is not None

    @cached_property
    def _content(self) -> durable.Content:
        return content_of(self._message)

    @property
    def request_dict(self) -> dict[str, Any]:
        """The request for the pool's process, with the stores that may have the row, and a message to adopt.

        For each of these stores it has the place, and the identity under which this worker claims there.
        """
        given, store = super().request_dict, self._address.store
        given.pop(durable.HELD, None)  # from an earlier call of this
        given[durable.WORKER] = [
            (heartbeat.runtime.store.place, heartbeat.worker_id)
            for heartbeat in self._holders
            if heartbeat.may_claim and store in (None, heartbeat.runtime.store.name)
        ]
        if self._kept is not None:
            given[durable.DIGEST] = durable.Digest(self._content.digest)
        elif given.get(durable.HEADER) is None:
            own = (given, self._payload) if self._decoded else None
            given[durable.ADOPTED] = received(self._app, self.task_name, self._message, own)
        if self.held is not None and (0, self.held.held.worker_id) in given[durable.WORKER]:
            # Without a beat for a lease this worker may have been declared dead, and the run may belong to another
            # worker.
            stands = self.held.stands and not self._has_gate(*self._holders) and self._address.call is None
            given[durable.HELD] = self.held._replace(stands=stands)
        return given

    def hold(self, held: durable.HeldRun) -> None:
        """Note that this worker holds its row."""
        self.held = held
        for _, delivery in self._deliveries:
            delivery.held = held.held

    @property
    def fresh(self) -> Fresh | None:
        """The row to hold for it before it waits for the pool; None if its process locks the row."""
        if self.held is not None or self._kept is None or self.task.lost_policy != REQUEUE:
            return None
        if (
            self._content.unpack is not None
            or self._has_gate(*self._holders)
            or list(self._holders) != [self._heartbeat]
        ):
            return None
        if self._address.call is not None or not self._heartbeat.may_claim:  # the copy to run may be in another store
            return None
        if self._app.sidejob.runtime.connections.is_broker:
            return None  # its fetch would have held it
        max_losses = self.task.max_losses or self._app.sidejob.settings.max_losses
        return Fresh(self._kept, self._content, max_losses) if max_losses > 1 else None  # its first loss counts

    def begins(self) -> bool:
        """Adds that a task which was revoked while it waited for a thread does not begin; Celery no longer checks."""
        return not (self.id in revoked and self.revoked()) and super().begins()

    def unhold(self) -> None:
        """Have its row given back, if it is held."""
        if self.held is not None:
            self._app.sidejob.heartbeat.tasks.unhold(self.held.held)

    def end(self, over: Ended) -> None:
        """Remove the row of the run, as its process has left only that to this worker."""
        end = QuietEnd(over, lambda: self._content)
        # Where the store is the broker, a fetch follows soon that can write it.
        waits = is_busy() or (over.result is None and self._app.sidejob.runtime.connections.is_broker)
        self._app.sidejob.heartbeat.tasks.ends.add(end, waits=waits)

    def maybe_expire(self) -> bool:
        """Tell whether it has expired.

        Celery would also note its id as revoked, but a forged delivery has the id of a task that has not expired.
        """
        expires = self.expires
        return expires is not None and bool(datetime.now(UTC if expires.tzinfo else None) > expires)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """At a hard limit the worker buries the task: its process is about to be killed. Celery fails it once."""
        if soft:
            super().on_timeout(soft, timeout)
            return
        with self._stopped("failed", f"TimeLimitExceeded: the run took longer than {timeout} seconds"):
            if not self._failed:
                self._failed = True
                self._told(super().on_timeout, soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """End a run that is revoked; the death of its process is then no loss."""
        self._plan(ENDED)
        try:
            super().terminate(pool, signal)
        except NotImplementedError:  # solo and threads: the body goes on, and its end finds no row
            run = RUNS.get(self.id)
            if run is not None and run.key == self._key:
                run.is_revoked = True
            self._announce_revoked("terminated", True, signal, False)
            for runs, _ in self._deliveries:
                runs.stopped(self._key)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Leave a lost process to the heartbeat; bury any other failure, unless the process has buried it."""
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if isinstance(error, Copy | Forged | Left):
            return self._not_begun(error)
        if isinstance(error, WorkerLostError | SystemExit | KeyboardInterrupt):
            return self._lost(error)
        if isinstance(error, TimeLimitExceeded):
            if self._failed:
                self.acknowledge()
                return None
            self._failed = True
            end: Any = self._stopped("failed", f"TimeLimitExceeded: {error}")
        elif isinstance(error, Reject):  # its process has written this end, and its result if that is a part of it
            end = self.task.backend.riding() if self._ends_with_result else nullcontext()
        elif isinstance(error, Ignore | Retry) or self._already_revoked or self._already_cancelled:
            end = nullcontext()
        else:
            # If the process could not even decode the message, only this worker can bury it.
            end = self._buried("failed", f"{type(error).__name__}: {text_of(error)}", str(exc_info.traceback))
        try:
            with end:
                return self._told(super().on_failure, exc_info, send_failed_event, return_ok)
        finally:
            self.over()

    def _told(self, tell: Callable[..., Any], *args: Any) -> Any:
        """Let Celery report a failure; its result backend may be unreachable, and this process cannot wait for it."""
        try:
            return tell(*args)
        except MemoryError:
            raise
        except Exception as error:
            logger.error("That task %s failed is not told: %s", self.id, text_of(error))
            return self.acknowledge()

    def _not_begun(self, why: Copy | Forged | Left) -> None:
        """Run nothing here. A silent store may still lock the row for it later, when nothing waits for it any more."""
        task_ready(self)
        self.unhold()  # its process may not have reached the store to release it
        for runs, delivery in self._deliveries:
            runs.idle(delivery)
            if isinstance(why, Left):
                runs.left(delivery)
        if isinstance(why, Forged) and self.acknowledged:
            self.send_event("task-rejected", requeue=False)
        elif isinstance(why, Forged):
            self.reject(requeue=False)  # RabbitMQ may have a dead letter exchange for it
        else:
            self._forget(is_all=isinstance(why, Left) and not self._has_row)
        self.over()

    def _lost(self, error: BaseException) -> None:
        task_ready(self)
        self._forget(is_all=not self._has_row)
        self.send_event("task-failed", exception=repr(error), traceback=None)

    def _forget(self, *, is_all: bool) -> None:
        """Let its row decide what happens to it; a message that `is_all` there is goes back to the broker."""
        if is_all:
            self.reject(requeue=True)
        else:
            self.acknowledge()

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """It was revoked or has expired: it does not run (any more), and the dead set has the reason."""
        kind = "expired" if expired else "revoked"
        error = f"TaskRevokedError: the task was {kind}" + (f" ({reason})" if reason != kind else "")
        if expired or terminated or self._kept is None or not self._holders:
            with self._stopped(kind, error):
                super()._announce_revoked(reason, terminated, signum, expired)
            return
        # The revocation has probably marked its row, and then the sweeper announces the end. So that the end is
        # announced once, the sweeper does it in any case.
        self._plan(ENDED)
        for heartbeat in self._holders:
            heartbeat.errands.soon(partial(heartbeat.tasks.revoke, self._key))
        self.unhold()  # the sweeper buries waiting rows
        task_ready(self)
        self.acknowledge()
        self._already_revoked = True

    def _stopped(self, reason: str, error: str) -> AbstractContextManager[None]:
        self._plan(ENDED)
        return self._buried(reason, error, None)

    @contextmanager
    def _buried(self, reason: str, error: str, traceback: str | None) -> Iterator[None]:
        """Bury it soon; the burial also writes what Celery tells the result backend within the block, if it can.

        Otherwise its result is there before or after that: another backend's, or that of a task whose errbacks may read
        it, or of a message without a row.
        """
        with self.task.backend.riding() if self._ends_with_result else nullcontext(()) as riders:
            try:
                yield
            finally:
                self._bury(durable.Death(reason, error, traceback, self._request_dict.get("retries") or 0), riders)

    @property
    def _ends_with_result(self) -> bool:
        return (
            self._kept is not None
            and not self._context.errbacks
            and all(results.ends_with_result(self.task.backend, heartbeat.runtime) for heartbeat in self._holders)
        )

    def _bury(self, death: durable.Death, riders: Sequence[Rider]) -> None:
        for heartbeat in self._holders:
            fail = partial(heartbeat.tasks.fail, address=self._address, content=self._content, riders=riders)
            heartbeat.errands.soon(partial(fail, self._key, death))

    def over(self) -> None:
        """Note that this delivery is finished without effect, and acknowledge a message that has no row."""
        super().over()
        if self._kept is None and not self.acknowledged:
            self.acknowledge()

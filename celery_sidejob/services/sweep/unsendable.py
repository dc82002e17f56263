"""Moves messages that no queue will ever take to the dead set: the sweeper would try them for ever."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ...model.durable import Death, Message
from ...model.errors import StoreUnavailableError
from ...model.logger import log_row_error
from ...model.messages import Continuation, Doorbell
from ...model.names import storable
from ...model.protocols import Refused
from ...operations import deduplication
from ...operations.ledger import burials
from ...operations.runtime import Runtime
from ...store import workers
from ..duty import Report
from ..heartbeat.heartbeat import Heartbeat
from ..heartbeat.run_ends import Stop, end_from_outside

REASON = "unsendable"


class Unsendable:
    """Buries messages of one store, each separately: a message that cannot be buried does not stop the others.

    With a `worker` it claims runs under that worker's identity.
    """

    def __init__(self, runtime: Runtime, worker: Heartbeat | None = None) -> None:
        self._runtime = runtime
        self._worker = worker

    def bury(self, refused: Refused, report: Report) -> None:
        """Bury the refused messages, and count the durable tasks among them."""
        if not refused:
            return
        for message, error in refused:
            try:
                buried = self._bury(message, f"{type(error).__name__}: {error}")
                report["tasks_buried"] += buried and isinstance(message, Message)
            except StoreUnavailableError:
                raise
            except Exception:
                log_row_error(
                    message.task_id, "The message of %s could not be buried; it is tried again", message.task_id
                )

    def _bury(self, message: Message | Doorbell | Continuation, error: str) -> bool:
        if isinstance(message, Doorbell):
            return self._fail_job(message, error)
        if isinstance(message, Continuation):
            return burials.bury_continuation(self._runtime, message, reason=REASON, error=error)
        return self._bury_task(message, error)

    def _bury_task(self, message: Message, error: str) -> bool:
        """Report it to the backend, then bury it; after a death in between it is reported once more."""
        key = (message.task_id, message.generation)
        (address,) = deduplication.addresses_of(self._runtime, [message])
        if deduplication.gives_way(self._runtime, key, address):
            return False
        verdict, riders = self._runtime.results.tell_of_doom(message, REASON, error, place=self._runtime.store.place)
        if verdict != "bury":
            return False
        return burials.fail(
            self._runtime, key, Death(REASON, error), by="sweeper", worker_id=None, address=address, riders=riders
        )

    def _fail_job(self, bell: Doorbell, error: str) -> bool:
        """Claim the run whose message cannot be sent, and end it as failed; a death in between leaves a lost run."""
        kind, _, text = storable(error).partition(": ")
        stop = Stop(kind, text, REASON)
        with self._lent_identity() as worker_id:
            key = (bell.job_id, bell.for_run)
            return end_from_outside(self._runtime, key, bell.task, stop, worker_id=worker_id)

    def _lent_identity(self) -> AbstractContextManager[int]:
        """Return an identity that can claim a run: the worker's, or a temporary one."""
        if self._worker is not None:
            return nullcontext(self._worker.worker_id)
        return workers.as_worker(self._runtime.connections)

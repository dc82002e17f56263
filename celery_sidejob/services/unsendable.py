"""Moves messages that no queue will ever take to the dead set: they would be tried for ever, and run never."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..model.durable import Message
from ..model.errors import StoreUnavailableError
from ..model.messages import Continuation, Doorbell
from ..model.protocols import Refused
from ..model.troubles import log_trouble
from ..operations import burials, copies
from ..operations.endings import storable
from ..operations.runtime import Runtime
from ..store import dead, workers
from .stopped_runs import end_run

logger = logging.getLogger("celery_sidejob")

REASON = "unsendable"


class Worker(Protocol):
    """The worker under whose identity a sweeper may claim: the heartbeat."""

    worker_id: int


class Unsendable:
    """Buries messages of one store, each by itself: one that cannot be buried keeps no other from it."""

    def __init__(self, runtime: Runtime, worker: Worker | None = None) -> None:
        self._runtime = runtime
        self._worker = worker

    def bury(self, refused: Refused) -> int:
        """Bury what was refused, and return how much that was."""
        if not refused:
            return 0
        reason = dead.known_reason(self._runtime.connections, REASON)
        buried = 0
        for message, error in refused:
            try:
                buried += self._bury(message, f"{type(error).__name__}: {error}", reason)
            except StoreUnavailableError:
                raise
            except Exception:
                log_trouble(
                    logger, message.task_id, "The message of %s could not be buried; it is tried again", message.task_id
                )
        return buried

    def _bury(self, message: Message | Doorbell | Continuation, error: str, reason: str) -> bool:
        if isinstance(message, Doorbell):
            return self._fail_job(message, error, reason)
        if isinstance(message, Continuation):
            return burials.bury_continuation(self._runtime, message, reason=reason, error=error)
        return self._bury_task(message, error, reason)

    def _bury_task(self, message: Message, error: str, reason: str) -> bool:
        """Tell the backend, then bury; dying in between only tells it once more."""
        key = (message.task_id, message.generation)
        (address,) = copies.addresses_of(self._runtime, [message])
        if copies.gives_way(self._runtime, key, address):
            return False
        verdict = self._runtime.results.tell_of_doom(message, REASON, error, place=self._runtime.place)
        if verdict != "bury":
            return False
        return burials.fail(
            self._runtime, key, by="sweeper", worker_id=None, reason=reason, error=error, address=address
        )

    def _fail_job(self, bell: Doorbell, error: str, reason: str) -> bool:
        """Claim the run that nobody can be told of, and end it as failed; dying in between leaves a lost run."""
        kind, _, text = storable(error).partition(": ")
        with self._identity() as worker_id:
            key = (bell.job_id, bell.for_run)
            return end_run(self._runtime, key, bell.task, kind, text, reason, worker_id=worker_id)

    @contextmanager
    def _identity(self) -> Iterator[int]:
        """Lend an identity under which a run can be claimed: the worker's, or one for this moment."""
        if self._worker is not None:
            yield self._worker.worker_id
            return
        connections: Any = self._runtime.connections
        worker_id = workers.register(connections, f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}")
        try:
            yield worker_id
        finally:
            workers.leave(connections, worker_id)

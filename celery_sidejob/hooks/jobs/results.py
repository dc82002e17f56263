"""Delivers the outcome of an asking to Celery's places for it: result backend, callbacks, chain, chord."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from typing import Any, Literal, cast

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, states
from celery.app.backends import by_url
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.canvas import maybe_signature
from celery.exceptions import NotRegistered
from kombu.utils.json import loads as kombu_loads
from kombu.utils.uuid import uuid

from ...model import errors, values
from ...model.durable import Message
from ...model.errors import InvalidValueError
from ...model.logger import logger
from ...model.messages import Continuation, Outcome
from ...model.protocols import Rider
from ...model.status import Status
from ...model.urls import is_alone
from ...operations.runtime import Runtime
from ...results.backend import PostgresBackend
from .. import events
from ..broker.publishing import INLINE, continuation_text
from ..errors import TaskRevokedError
from ..messages import carried, kept_message
from ..tasks import results

FROM_OUTSIDE = (TimeLimitExceeded, WorkerLostError, TaskRevokedError)
"""The errors of runs whose process was stopped or died."""


class CeleryResults:
    """Knows what must be sent at the end of an asking, and sends it."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    @cached_property
    def _kind(self) -> type[Any]:
        """The class of the result backend. `app.backend` would connect to it, and may create its tables."""
        kind, _ = by_url(self._app.backend_cls or self._app.conf.result_backend, self._app.loader)
        return cast("type[Any]", kind)

    @property
    def in_store(self) -> bool:
        """Whether the result backend is the app's store."""
        return issubclass(self._kind, PostgresBackend) and is_alone(self._app.conf.result_backend)

    @property
    def _backend(self) -> Any:
        return results.install(self._app.backend)

    def wanted(self, task: str, options: Mapping[str, Any] | None) -> bool:
        """Whether the backend, a chord or an errback needs the outcome."""
        if options and (options.get("chord") or options.get("link_error") or options.get("chain")):
            return True
        known = self._app.tasks.get(task)
        ignored = (options or {}).get("ignore_result")
        if ignored is None:
            ignored = known.ignore_result if known is not None else self._app.conf.task_ignore_result
        return not ignored and not issubclass(self._kind, DisabledBackend)

    def connect(self) -> None:
        """Make the backend: `freeze` of a follow-up makes a result, which needs the backend."""
        results.install(self._app.backend)

    def continuations(self, outcome: Outcome) -> Sequence[Continuation]:
        """Return callbacks and the rest of the chain, each frozen under its own task id."""
        options = _revive(outcome.options)
        if outcome.outcome != Status.COMPLETED or not options:
            return []
        value = values.decode(outcome.result)
        further = {"parent_id": outcome.task_id, "root_id": options.get("root_id") or outcome.task_id}
        found = [self._continuation(link, value, further) for link in options.get("link") or ()]
        chain = options.get("chain")
        if chain:
            found.append(self._continuation(chain[-1], value, {**further, "chain": chain[:-1]}))
        return found

    def _continuation(self, link: Any, value: Any, options: dict[str, Any]) -> Continuation:
        signature = maybe_signature(link, app=self._app).clone()
        task_id = signature.options.get("task_id") or uuid()
        signature.set(task_id=task_id)
        signature.freeze(task_id)
        queue = signature.options.get("queue") or self._app.conf.task_default_queue
        return Continuation(task_id, str(getattr(queue, "name", queue)), continuation_text(signature, [value], options))

    def riders(self, outcome: Outcome) -> Sequence[Rider]:
        """Return what the commit that ends an asking writes, if the result backend is the store."""
        if not self.in_store:
            return ()
        with self._backend.riding() as riders:
            self._store(outcome, calls_errbacks=False)
        return cast("Sequence[Rider]", riders)

    def deliver(self, outcome: Outcome) -> bool:
        """Store the result, count the chord's part, call errbacks; False if that failed and must be repeated."""
        try:
            self._store(outcome)
        except Exception as error:
            logger.warning("The result of %s could not be stored; it is tried again: %s", outcome.task_id, error)
            return False
        return True

    def show(self, outcome: Outcome) -> bool:
        """Store only the state of an asking and its details: no callbacks, no chord. Never raises."""
        backend = self._app.backend
        options = _revive(outcome.options)
        if isinstance(backend, DisabledBackend) or not self._stores(outcome.task, options):
            return False
        state, value, trace = self._read(outcome)
        try:
            request = self._request(outcome, options)
            backend.store_result(outcome.task_id, value, state, traceback=trace, request=request)
        except Exception as error:
            logger.warning("%s could not be shown as %s: %s", outcome.task_id, state, error)
            return False
        return True

    def send_late_bodies(self) -> None:
        """Send the bodies of chords whose last process has died, if the result backend is the store."""
        if issubclass(self._kind, PostgresBackend):
            self._backend.send_late_bodies()

    def tell_of_doom(
        self, message: Message, reason: str, error: str, *, place: int, failure: BaseException | None = None
    ) -> tuple[Literal["bury", "remove", "wait"], Sequence[Rider]]:
        """Store FAILURE or REVOKED for a durable task, call its errbacks, and count it for its chord."""
        runtime: Runtime = self._app.sidejob.runtime
        try:
            return self._tell_of_doom(message, reason, failure or error, runtime.at_place(place))
        except Exception as problem:
            logger.warning("The end of %s could not be stored; it is tried again: %s", message.task_id, problem)
            return "wait", ()

    def forget(self, executor: Any, task_ids: Sequence[str], *, place: int) -> None:
        """Remove results in a transaction of the store at this position, if they are in it."""
        runtime: Runtime = self._app.sidejob.runtime
        if self.in_store and results.ends_with_result(self._app.backend, runtime.at_place(place)):
            self._app.backend.forget_with(executor, task_ids)

    def module_of(self, error: str) -> str:
        """Return the module of an error class: Celery's, or one of ours."""
        return next((kind.__module__ for kind in FROM_OUTSIDE if kind.__name__ == error), errors.__name__)

    def fail_continuation(self, continuation: Continuation, error: str) -> None:
        """Store FAILURE for a callback or the rest of a chain that will not be sent, and call its errbacks."""
        backend, errbacks = self._backend, None
        try:
            kept = kombu_loads(continuation.publication)
            errbacks = kept["signature"]["options"].get("link_error")
        except (ValueError, LookupError, TypeError, AttributeError):
            pass  # it is unreadable, which may be why it is not sent
        request = Context({"id": continuation.task_id, "task": continuation.task, "errbacks": errbacks})
        try:
            backend.mark_as_failure(
                continuation.task_id,
                InvalidValueError(error.partition(": ")[2]),
                None,
                request,
                not isinstance(backend, DisabledBackend),
            )
        except Exception as problem:
            logger.warning("The end of %s could not be stored: %s", continuation.task_id, problem)

    def announce_revoked(self, message: Message) -> None:
        """Send Celery's event and signal for a task that was revoked before it ran; at most once."""
        try:
            events.announce_revoked(self._app, message, kept_message.request_of(self._app, message))
        except Exception as error:
            logger.warning("That %s was revoked could not be announced: %s", message.task_id, error)

    def _tell_of_doom(
        self, message: Message, reason: str, error: str | BaseException, runtime: Runtime
    ) -> tuple[Literal["bury", "remove", "wait"], Sequence[Rider]]:
        backend, request = self._backend, kept_message.request_of(self._app, message)
        stores = not isinstance(backend, DisabledBackend) and not request.ignore_result
        in_store = results.ends_with_result(backend, runtime)
        state = None
        # Kept with the end, a success is of an earlier task with this id, unless another store has a copy of the row.
        if stores and not (in_store and runtime.is_alone):
            with suppress(*results.UNREADABLE):  # then it is replaced
                state = backend.get_state(message.task_id)
        if state == states.SUCCESS:
            # Its process died after that, before its row was removed. Its follow-ups were not published.
            value = backend.get_result(message.task_id) if request.chord else None
            if not results.count_again(runtime, backend, request, value):
                return "wait", ()
            return ("bury" if request.callbacks or request.chain else "remove"), ()
        with backend.riding() if in_store and not request.errbacks else nullcontext(()) as riders:
            if reason in ("expired", "revoked"):
                backend.mark_as_revoked(message.task_id, reason, request, stores)
            else:
                if isinstance(error, str):
                    kind = {"unsendable": InvalidValueError, "failed": NotRegistered}.get(reason, WorkerLostError)
                    error = kind(error.partition(": ")[2])
                backend.mark_as_failure(message.task_id, error, None, request, stores)
        return "bury", riders

    def _store(self, outcome: Outcome, *, calls_errbacks: bool = True) -> None:
        backend = self._backend
        options = _revive(outcome.options)
        request = self._request(outcome, options)
        store_result = not isinstance(backend, DisabledBackend) and self._stores(outcome.task, options)
        state, value, trace = self._read(outcome)
        if request.chord:
            results.install_counting(backend)
        if outcome.outcome == Status.COMPLETED:
            backend.mark_as_done(outcome.task_id, value, request, store_result)
        elif outcome.outcome == Status.TERMINATED:
            backend.mark_as_revoked(outcome.task_id, str(value), request, store_result)
        elif outcome.is_told:
            backend._call_task_errbacks(request, value, trace)
        else:
            backend.mark_as_failure(
                outcome.task_id, value, trace, request, store_result, call_errbacks=calls_errbacks, state=state
            )

    def _read(self, outcome: Outcome) -> tuple[str, Any, str | None]:
        """Return an outcome in a backend's form: Celery's state, the value or the exception, and its traceback."""
        if outcome.outcome == Status.COMPLETED:
            value = values.decode(outcome.result)
            if values.has_escapes(outcome.result) and self._app.backend.serializer == "json":
                value = carried.readable(value)
            return states.SUCCESS, value, None
        state, error = outcome.outcome.upper(), json.loads(outcome.result)
        if outcome.outcome == Status.TERMINATED or (outcome.outcome == Status.FAILED and error is None):
            # A run that was to be tried again has no error to end with.
            return states.REVOKED, TaskRevokedError("the job was terminated"), None
        if error is None or "type" not in error:  # it is suspended, or makes progress
            return state, error, None
        if outcome.outcome == Status.FAILED:
            state = states.REVOKED if error["type"] == "TaskRevokedError" else states.FAILURE
        value = self._app.backend.exception_to_python(
            {"exc_type": error["type"], "exc_message": _arguments_of(error), "exc_module": error["module"]}
        )
        if not isinstance(value, BaseException):
            value = Exception(error["message"])
        return state, value, error.get("traceback")

    def _request(self, outcome: Outcome, options: Mapping[str, Any]) -> Context:
        """Return the request of an asking, with the attributes that Celery's backends read."""
        return Context(
            {
                "id": outcome.task_id,
                "task": outcome.task,
                "args": values.decode(outcome.args),
                "kwargs": values.decode(outcome.kwargs),
                "chord": maybe_signature(options.get("chord"), app=self._app) if options.get("chord") else None,
                "group": options.get("group_id"),
                "group_index": options.get("group_index"),
                "chain": options.get("chain"),
                "errbacks": options.get("link_error"),
                "root_id": options.get("root_id") or outcome.task_id,
                "parent_id": options.get("parent_id"),
                "reply_to": options.get("reply_to"),
                "correlation_id": outcome.task_id,
                "delivery_info": {"routing_key": outcome.queue},
            }
        )

    def _stores(self, task: str, options: Mapping[str, Any]) -> bool:
        if INLINE.get() is not None and not self._app.conf.task_store_eager_result:
            return False
        known = self._app.tasks.get(task)
        ignored = options.get("ignore_result")
        return not (ignored if ignored is not None else known.ignore_result if known is not None else False)


def _arguments_of(error: Mapping[str, Any]) -> list[str]:
    """Return the arguments of an error from its row; a `JobFailed` has its failure group first."""
    return [error["message"]] if error.get("group") is None else [error["group"], error["message"]]


def _revive(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Turn options from their row back into the types that Celery's code expects: dates, signatures as dicts."""
    revived: dict[str, Any] = kombu_loads(json.dumps(dict(options))) if options else {}
    return revived

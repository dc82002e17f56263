"""Reports the outcome of a durable task's run to the result backend, exactly once, even if the backend is unreachable.

An unreachable backend does not change the body's outcome. If a success cannot be reported, the end of the run reports
it later, and keeps the row until then (`operations/ledger/durable_ends.py`). A failure is reported for up to a lease;
after that only the dead set has the failure. For parts of a chord both take up to an hour: no other process knows that
a part has ended, and its chord would wait for ever.

A chord's part may be counted by a process that dies meanwhile: the body must be published, and only once. Celery counts
a part after it has stored its result, and the process that counts the last part publishes the body. Its Redis backend
counts a part once, however often the part is reported, and releases the claim to publish if its owner is silent. So a
repeated report is safe until the body is known and the backend has forgotten the chord, which it does once the body is
published. For a durable body that is when it is kept: until then the process that has counted the last part has the
claim, and after its death the next process finds everything as it was. Celery before 5.7 has no such claim; there the
body is kept while the backend waits. With databases a task waits for all results, which needs none of this; backends
that only count cannot be told again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import states
from celery.app.task import Context
from celery.exceptions import ChordError, Reject, SoftTimeLimitExceeded
from celery.result import GroupResult, result_from_tuple
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError

from ...model.durable import ADOPTED, HEADER, Message
from ...model.errors import StoreUnavailableError
from ...model.logger import logger
from ...model.names import storable, text_of
from ...operations.ledger import keeping
from ...operations.ledger.durable_ends import LATE_END_PATIENCE_S
from ...operations.ledger.durable_runs import Run
from ...operations.runtime import PAUSE_S, Runtime
from ...results.backend import AWAY, PostgresBackend
from .. import bodies
from ..patches import result_backend
from ..task_options import UNLOCK
from .present import Counting, Together, calling, present_call, present_run, run_of_request

if TYPE_CHECKING:
    from celery.backends.redis import RedisBackend


UNREADABLE = (DecodeError, ContentDisallowed)
"""Errors of a result backend that cannot read its own data; Celery's backends read before they store."""


def install(backend: Any) -> Any:
    """Report durable tasks to a backend in this way, and return the backend; a second call has no effect."""
    if not hasattr(backend, "tells_of_durable_tasks"):
        result_backend.tell_by(
            backend,
            store_result=partial(_store, backend),
            mark_as_done=partial(_done, backend),
            mark_as_failure=partial(_failed, backend),
            mark_as_retry=_retried,
            chord_error_from_stack=partial(fail_unlocked, backend),
            _call_task_errbacks=partial(_call_errbacks, backend),
        )
        backend.tells_of_durable_tasks = True
    return backend


def ends_with_result(backend: Any, runtime: Runtime) -> bool:
    """Tell whether the results of a backend are in the store that has the row: the end writes its result."""
    return isinstance(backend, PostgresBackend) and backend.is_in(runtime.connections)


def _store(
    backend: Any, store: Callable[..., Any], task_id: str, result: Any, state: str, *args: Any, **options: Any
) -> Any:
    """Store a result; a durable task runs even if its start cannot be reported to the backend.

    The stored result may be unreadable, for example from a worker with another `result_serializer`: then it is
    replaced.
    """
    try:
        try:
            return store(task_id, result, state, *args, **options)
        except UNREADABLE as error:
            logger.warning("What the backend has of task %s is replaced: %s", task_id, text_of(error))
            backend.forget(task_id)
            return store(task_id, result, state, *args, **options)
    except Exception as error:
        request = options.get("request")
        if state != states.STARTED or request is None or not (request.get(HEADER) or request.get(ADOPTED)):
            raise
        logger.warning("%s is not shown as started: %s", task_id, error)
        return None


def _done(
    backend: Any,
    mark: Callable[..., Any],
    task_id: str,
    result: Any,
    request: Context | None = None,
    *args: Any,
    **options: Any,
) -> None:
    """Report a success; the end of the run reports what remains."""
    run = run_of_request(request)
    if run is None or request is None:
        mark(task_id, result, request, *args, **options)
        return
    if ends_with_result(backend, run.runtime):
        with _refusing(), backend.riding() as riders:
            mark(task_id, result, request, *args, **options)
        run.riders = riders
        run.is_told = True
        return
    success = _Success(run, backend, request, result, lambda: mark(task_id, result, request, *args, **options))
    try:
        with _refusing():
            success.mark()
        success.is_told = True
    except EncodeError:
        raise
    except Exception as error:
        logger.warning("That task %s ended well cannot be told yet: %s", task_id, text_of(error))
    run.is_told = True
    if request.chord or not success.is_told:
        run.untold = success


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise EncodeError if the task has no such result: Celery treats this error as its failure."""
    try:
        yield
    except REFUSED as error:
        raise error if isinstance(error, EncodeError) else EncodeError(text_of(error)) from error


@dataclass(slots=True)
class _Success:
    """Implements `operations.ledger.durable_runs.Untold`."""

    run: Run
    backend: Any
    request: Context
    value: Any
    mark: Callable[[], Any]
    is_told: bool = False

    @property
    def is_part(self) -> bool:
        return bool(self.request.chord)

    def tell(self) -> bool:
        try:
            if not self.is_told:
                self.mark()
                self.is_told = True
            return is_settled(self.run, self.backend, self.request, self.value)
        except Exception as error:
            logger.debug("That task %s ended well cannot be told yet: %s", self.run.key[0], error)
            return False


def _failed(
    backend: Any,
    mark: Callable[..., Any],
    task_id: str,
    exc: BaseException,
    traceback: str | None = None,
    request: Context | None = None,
    *args: Any,
    **options: Any,
) -> None:
    """Report a failure, for up to a lease; but no failure that a hook or Celery raised after the outcome's report."""
    run = run_of_request(request)
    if run is None:
        mark(task_id, exc, traceback, request, *args, **options)
        return
    if run.is_told or run.moved:
        logger.error("Task %s has another outcome, after which this was raised: %s", task_id, text_of(exc))
        return
    patience_s = LATE_END_PATIENCE_S if request is not None and request.chord else run.runtime.settings.lease
    deadline = time.monotonic() + patience_s
    # An errback may read the result.
    rides = ends_with_result(backend, run.runtime) and not (request is not None and request.errbacks)
    while True:
        try:
            with backend.riding() if rides else nullcontext([]) as riders:
                mark(task_id, exc, None if traceback is None else storable(str(traceback)), request, *args, **options)
            run.riders = riders
            break
        except Exception as error:
            if isinstance(error, REFUSED) and traceback is not None:
                logger.exception("Task %s failed with %s, which the backend refuses", task_id, text_of(exc))
                exc, traceback = bodies.unstorable(exc, error), None
            elif isinstance(error, REFUSED) or time.monotonic() > deadline:
                logger.error("That task %s failed is not told: %s", task_id, text_of(error))
                break
        time.sleep(PAUSE_S)
    run.is_told = True


def _call_errbacks(backend: Any, call: Callable[..., Any], request: Context, exc: Any, traceback: Any) -> None:
    """Call or send each errback separately, so that a failure to send one does not repeat the others.

    An errback that can never be sent is given up. If the store or the broker is unreachable, a durable run tries for a
    lease. After that the unsent errbacks remain in `request`, and the error is raised: the caller then reports the
    failure again.
    """
    run = run_of_request(request) or present_run(backend.app)
    deadline = time.monotonic() + (0.0 if run is None else run.runtime.settings.lease)
    errbacks = list(request.errbacks)
    while errbacks:
        one = copy(request)
        one.errbacks = errbacks[:1]
        try:
            call(one, exc, traceback)
        except (*AWAY, SoftTimeLimitExceeded) as error:
            if time.monotonic() > deadline:
                request.errbacks = errbacks
                raise
            logger.debug("An errback of task %s cannot be sent yet: %s", request.id, error)
            time.sleep(PAUSE_S)
            continue
        except Exception as error:
            logger.error("An errback of task %s cannot be sent: %s", request.id, text_of(error))
        del errbacks[0]


def _retried(
    mark: Callable[..., Any], task_id: str, exc: BaseException, traceback: str | None = None, **options: Any
) -> None:
    """Report a retry; the task is retried even if that fails."""
    if run_of_request(options.get("request")) is None:
        mark(task_id, exc, traceback, **options)
        return
    try:
        mark(task_id, exc, None if traceback is None else storable(str(traceback)), **options)
    except Exception as error:
        logger.warning("%s is not shown as retried: %s", task_id, text_of(error))


REFUSED = (EncodeError, DecodeError, ContentDisallowed, TypeError, ValueError)
"""Errors of the result backend that are due to a value; after any other error it may have been unreachable."""
_SENDING = ("Callback error", "chord_unlock could not be retried")
"""The beginnings of Celery's texts for a chord that failed because a message could not be sent."""
CLAIM_S = 10
"""Seconds for which the claim to a body is valid after each renewal."""
FRESH_S = 3.0
"""Seconds for which a claim needs no check."""
DONE = (b"done", "done")
"""The value with which Celery's backend replaces a claim when it forgets a chord."""


@dataclass(eq=False, slots=True)
class ChordClaim:
    """The claim to the body of one chord; see `operations.ledger.durable_runs.Claim`."""

    runtime: Runtime
    backend: RedisBackend
    request: Context
    messages: Sequence[Message]
    token: str
    forget: Callable[[], Any]
    """Celery's own cleanup, which was postponed."""
    held_at: float = field(default_factory=time.monotonic)

    def hold(self) -> bool | None:
        """Renew the claim; False if the body is known, None while another process may publish it."""
        if time.monotonic() - self.held_at < FRESH_S:
            return True
        try:
            if self.renew():
                return True
            found = self.backend.client.get(self._key(".c"))
            if found is None:
                return True  # the backend was emptied, or has forgotten the chord because of its age
            return False if found in DONE or _body_is_known(self.runtime, self.backend, self.request) else None
        except StoreUnavailableError:
            raise
        except Exception as error:
            logger.debug("The claim to the body of chord %s could not be renewed: %s", self.request.group, error)
            return None

    def renew(self) -> bool:
        """Extend the claim, or take it again if it has expired; False if another process has it or it is obsolete."""
        began = time.monotonic()
        extended = self.backend._chord_claim_extend_script(
            keys=[self._key(".c"), self._key(".s")], args=[self.token, CLAIM_S], client=self.backend.client
        )
        self.held_at = began if extended else -math.inf
        return bool(extended)

    def settle(self) -> None:
        """Have the backend forget the chord."""
        try:
            self.forget()
        except Exception as error:
            logger.warning("Chord %s is left to expire in the result backend: %s", self.request.group, error)

    def _key(self, end: str) -> Any:
        return self.backend.get_key_for_group(self.request.group, end)


class CutOffError(Exception):
    """The backend was unreachable while it counted a part: the part is counted again."""


def install_counting(backend: Any) -> bool:
    """Let the backend forget a chord only when its body is kept, and count parts completely; False if it is no Redis.

    A second call has no effect.
    """
    result_backend.count_by(backend, count=partial(_count, backend))
    return result_backend.is_redis(backend)


def count_again(runtime: Runtime, backend: Any, request: Context, value: Any) -> bool:
    """Count a part that ended well; False while another process must publish the body, and may have died.

    `runtime` belongs to the store with the part; any store may have the body. In a run the body becomes a follow-up of
    the run; outside of a run the body is kept before this returns.
    """
    if not request.chord or not request.group or not result_backend.is_redis(backend):
        return True
    if _body_is_known(runtime, backend, request):
        return True
    install_counting(backend)
    run = present_run(backend.app)
    if run is not None:
        backend.on_chord_part_return(request, states.SUCCESS, value)
        return run.claim is not None or _is_settled(runtime, backend, request)
    together = Together()
    counting = Counting(runtime, request, together.messages, first=0)
    with calling(together=together, counting=counting):
        backend.on_chord_part_return(request, states.SUCCESS, value)
    if together.messages:
        keeping.keep_many(runtime, together.messages)
    if counting.claim is not None:
        counting.claim.settle()
    return _is_settled(runtime, backend, request)


def is_settled(run: Run, backend: Any, request: Context, value: Any) -> bool:
    """Tell, after a part was counted, whether the body is published, or this run will publish it.

    Usually it is, or other parts must still be counted. It is not if another run has counted the last part, and is
    about to publish the body, or died before it could.
    """
    if not request.chord or not request.group or not result_backend.is_redis(backend) or run.claim is not None:
        return True
    return not _is_complete(backend, request.group) or count_again(run.runtime, backend, request, value)


def _count(backend: RedisBackend, request: Context, *args: Any, **options: Any) -> Any:
    """Count a part; if it was the last part, its run gets the body as a follow-up, and the claim to it."""
    run = present_run(backend.app)
    ours = {"tell": partial(_fail, backend, request), "forget": partial(_forget, backend)}
    if run is None:
        return result_backend.count_part(backend, request, *args, **ours, **options)
    counting = Counting(run.runtime, request, run.follows, first=len(run.follows))
    try:
        with calling(counting=counting):
            counted = result_backend.count_part(backend, request, *args, **ours, **options)
    except Exception:
        del run.follows[counting.first :]  # errbacks, because the part is counted again
        raise
    run.claim = counting.claim or run.claim
    return counted


def fail_unlocked(backend: Any, tell: Callable[..., Any], callback: Any, exc: BaseException | None = None) -> Any:
    """Report that a chord failed; but if the backend was unreachable, retry the task that waits for the parts."""
    run = present_run(backend.app)
    cause = sys.exc_info()[1]
    if run is None or run.task != UNLOCK or cause is None:
        return tell(callback, exc)
    task = backend.app.current_worker_task
    kept = task.request.kwargs
    if not _was_cut_off(exc, cause, lambda: [result_from_tuple(part, backend.app) for part in kept["result"]]):
        return tell(callback, exc)
    logger.warning("Chord %s is looked at again: %r", task.request.args[0], cause)
    try:
        raise task.retry(countdown=kept.get("interval"))
    except Reject as error:  # its row could not be moved for a whole lease
        raise Reject(error.reason, requeue=True) from None


def _fail(backend: Any, request: Context, tell: Callable[..., Any], callback: Any, exc: BaseException) -> Any:
    """Report that a chord failed; if the backend was unreachable, the chord has not failed: raise the error instead."""
    cause = sys.exc_info()[1]
    if cause is not None and _was_cut_off(exc, cause, lambda: _parts(backend, request.group)):
        raise CutOffError(f"chord {request.group} is not counted to the end: {cause!r}") from cause
    return tell(callback, exc)


def _parts(backend: Any, group: str) -> Sequence[Any]:
    header = GroupResult.restore(group, backend=backend, app=backend.app)
    return () if header is None else header.results


def _was_cut_off(told: BaseException | None, cause: BaseException, parts: Callable[[], Sequence[Any]]) -> bool:
    """Tell whether a chord has not failed although Celery reports it because of `cause`: a server was unreachable.

    Reading a failed part raises its error, of any class. So the states of the parts are read.
    """
    if str(told).startswith(_SENDING):
        return isinstance(cause.reason if isinstance(cause, Reject) else cause, AWAY)
    if isinstance(cause, (ChordError, *REFUSED)):
        return False
    try:
        return not any(part.failed() or getattr(part, "state", None) == states.REVOKED for part in parts())
    except Exception:
        return True


def _forget(
    backend: RedisBackend, script: Callable[..., Any], *, keys: Sequence[Any], args: Sequence[Any], client: Any
) -> Any:
    """Let the backend forget a chord, but only once its body is kept."""
    forget = partial(script, keys=keys, args=args, client=client)
    counting = present_call().counting
    if counting is None or not counting.body:
        return forget()
    claim = counting.claim = ChordClaim(counting.runtime, backend, counting.request, counting.body, args[0], forget)
    try:
        claim.renew()  # Celery's own lasts as long as a broker may be tried, too long for a takeover
    except Exception as error:
        logger.warning("The claim to the body of chord %s is as Celery has made it: %s", claim.request.group, error)
    return True


def _is_settled(runtime: Runtime, backend: RedisBackend, request: Context) -> bool:
    return not _is_complete(backend, request.group) or _body_is_known(runtime, backend, request)


def _is_complete(backend: RedisBackend, group: str) -> bool:
    """Tell whether all parts are counted; the chord is forgotten when the body was published."""
    counted, more, size = (backend.get_key_for_group(group, end) for end in (".j", ".t", ".s"))
    with backend.client.pipeline(transaction=False) as pipe:
        (pipe.zcard if backend._chord_zset else pipe.llen)(counted)
        found, added, wanted = pipe.get(more).get(size).execute()
    return wanted is not None and found >= int(wanted) + int(added or 0)


def _body_is_known(runtime: Runtime, backend: RedisBackend, request: Context) -> bool:
    """Tell whether the body was published: some store keeps it, or the backend knows its state.

    Raises StoreUnavailableError if this is unknown because a store does not answer.
    """
    task_id = request.chord["options"].get("task_id")
    if task_id is None:
        return False
    silent: StoreUnavailableError | None = None
    try:
        if keeping.is_kept_somewhere(runtime, task_id):
            return True
    except StoreUnavailableError as error:
        silent = error
    if backend.get_state(task_id) != states.PENDING:
        return True
    if silent is not None:
        raise silent
    return False

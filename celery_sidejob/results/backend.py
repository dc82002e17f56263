"""Celery's result backend behind the URL `sidejobpg://`: one row of our schema for each result.

The parts of chords are counted in Postgres: the last part's process sends the body, and the sweeper if that one died. A
part's result and its count are one statement, and a part that runs twice is counted once. From that commit on the store
has all that the body needs. The commit that sends the body also forgets the chord, if the body is durable or a job, or
the store is the broker as well. If the broker is another server, the body is sent and then the chord forgotten: after a
death in between the body is sent again, with the same task id, unless its result is known (which the first process does
not ask, because a chord may be called twice).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, takewhile
from math import inf
from time import monotonic
from typing import Any, TypeVar

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin
from celery.backends.base import BaseKeyValueStoreBackend
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import GroupResult, allow_join_result
from celery.utils.functional import _regen
from celery.utils.time import get_exponential_backoff_interval
from kombu import serialization
from kombu.exceptions import OperationalError
from kombu.utils.encoding import bytes_to_str, ensure_bytes

from ..model import native
from ..model.errors import InvalidValueError, ResultTooLargeError, StoreUnavailableError
from ..model.logger import logger
from ..model.names import storable
from ..model.urls import SCHEME, is_alone, without_password
from ..store import chords, results
from ..store.chords import Owed, Part
from ..store.connection.connections import Connections
from ..store.results import Kept
from ..store.statement import Transaction
from .place import OPTIONS, Place, place_of
from .waiting import ResultConsumer, add_awaited_calls

T = TypeVar("T")


MOST_BYTES = 100_000_000
"""The most bytes of a result in its encoded form, as of the arguments of a durable task."""
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 5.0, 5.0)
"""The pauses between the attempts to keep a result while Postgres is away, such as during a restart."""
LONGEST_S = 1e9
"""The longest time for which a result is kept, in seconds, unless it is kept for ever: thirty years."""
APART_S = 60.0
"""The seconds that a broker which is not the store has to take a body, before the body is sent again."""
AWAY = (StoreUnavailableError, OperationalError, OSError)
"""Errors of sending a body while the store or the broker is unreachable: the chord has not failed for that."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """A part was counted with its result; `owed` if it was the last one."""

    owed: Owed | None


@dataclass(slots=True)
class Riding:
    """A result, or the end of a chord's part with its result, that is written by a commit of the caller's."""

    backend: Any
    result: Kept | None
    part: Part | None
    _owed: Owed | None = None
    _is_listened: bool = False

    @property
    def alone(self) -> Kept | None:
        """The result, if that is all: no part is counted with it."""
        return None if self.part else self.result

    def kept(self, *, is_listened: bool) -> None:
        """Note that a statement of the caller's has kept the result."""
        self._is_listened = is_listened

    def write(self, executor: Transaction) -> None:
        """Keep the result and count the part in the caller's transaction, again if an earlier one was not committed."""
        if self.part is not None:
            self._owed, self._is_listened = chords.count(executor, self.part, self.result)
        elif self.result is not None:
            self._is_listened = results.keep(executor, self.result)

    def committed(self) -> None:
        """Notify the callers that wait, and send the chord's body; if this process dies before, the sweeper does."""
        try:
            if self._is_listened and self.result is not None:
                self.backend.place.tell(self.result.key)
            if self._owed is not None:
                self.backend.send_body(self._owed)
        except Exception:
            logger.exception("The commit is made; the sweeper will do what should have followed it")


RIDERS: ContextVar[list[Riding] | None] = ContextVar("celery_sidejob_riders", default=None)
"""The writes that are collected for a commit of the caller's."""


class PostgresBackend(BaseKeyValueStoreBackend, AsyncBackendMixin):  # type: ignore[misc]
    """Keeps results in the table `results`.

    A result is kept by one statement, and notified after its commit to the callers that wait. While Postgres is away, a
    worker tries for 20 seconds to keep a result, or as `result_backend_always_retry` and
    `result_backend_max_retries` say; a read raises StoreUnavailableError at once, unless they say otherwise.
    """

    supports_native_join = True
    supports_result_compression = True
    supports_failure_expires = True

    key_t = staticmethod(lambda key: storable(bytes_to_str(key)))
    task_keyprefix = "task:"
    group_keyprefix = "group:"
    chord_keyprefix = "chord:"

    def __init__(self, app: Any, url: str | None = None, **options: Any) -> None:
        add_awaited_calls()
        super().__init__(app, url=url or f"{SCHEME}://", **options)
        failure = app.conf.get("result_failure_expires")
        self.failure_expires = self.expires if failure is None else self.prepare_expires(failure)
        self.result_consumer = ResultConsumer(self, app, self.accept, self._pending_results, self._pending_messages)

    @cached_property
    def place(self) -> Place:
        """Where the results are; SettingsError if the URL names no database."""
        return place_of(self.app, self.url, self.app.conf.get(OPTIONS) or {})

    def as_uri(self, include_password: bool = False) -> str:
        """Return the URL for people, or with its password."""
        if is_alone(self.url):
            return f"{SCHEME}://"
        return self.url if include_password else without_password(self.url, "**")

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Tell whether it is worth to try again: after an error of the connection it is."""
        return isinstance(exc, StoreUnavailableError)

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url, "expires": self.expires})

    def add_pending_result(self, result: Any, **_: Any) -> Any:
        """Do nothing: only a caller that waits is told, so that no group that nobody waits for is remembered."""
        return result

    def remove_pending_result(self, result: Any) -> Any:
        """Do nothing, likewise."""
        return result

    # -- rows ------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """Read what is kept under a key."""
        return self.place.read([key]).get(key)

    def mget(self, keys: Sequence[str], *, until: float = inf) -> Mapping[str, bytes]:
        """Read what is kept under some keys."""
        return self.place.read(list(keys), until=until)

    def set(self, key: str, value: Any) -> None:
        """Keep a value under a key, in place of another."""
        self._keep(Kept(key, states.SUCCESS, ensure_bytes(value), self._lifetime(self.expires)), replaces=True)

    def delete(self, key: str) -> None:
        """Remove what is kept under a key."""
        self.place.do("forget", partial(results.forget, keys=[key]))

    def cleanup(self) -> None:
        """Remove expired results, and send late bodies, as the sweeper of a worker with SideJob does by itself."""
        self.again("The removal of expired results", self.place.prune)
        self.send_late_bodies()

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: str | None = None, request: Any = None, **_: Any
    ) -> Any:
        """Keep a result, unless a success of the task is kept."""
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        body = ensure_bytes(self.encode(meta))
        error = self._too_large(task_id, state, len(body))
        if error is not None:
            logger.error("%s", error)
            meta = self._in_place_of(meta, error)
            body = ensure_bytes(self.encode(meta))
        expires = self.failure_expires if meta["status"] == states.FAILURE else self.expires
        kept = Kept(self.get_key_for_task(task_id), storable(str(meta["status"])), body, self._lifetime(expires))
        if not self._keep_with_part(kept, request, result, state):
            self._keep(kept)
        return result

    def _too_large(self, task_id: str, state: str, size: int) -> ResultTooLargeError | None:
        """Return the error of a result that takes too many bytes; its task has ended as it has."""
        if size <= MOST_BYTES:
            return None
        return ResultTooLargeError(
            f"The result of task {task_id}, which has ended with {state}, takes {size} bytes in its encoded form; "
            f"{MOST_BYTES} are kept. Store it elsewhere, and return where it is."
        )

    def _in_place_of(self, meta: Mapping[str, Any], error: ResultTooLargeError) -> dict[str, Any]:
        """Return what is kept in place of a result that is too large."""
        state = states.FAILURE if meta["status"] == states.SUCCESS else meta["status"]
        left = {key: value for key, value in meta.items() if key not in ("args", "kwargs")}
        return {**left, "status": state, "result": self.prepare_exception(error), "traceback": None}

    def is_in(self, connections: Connections) -> bool:
        """Tell whether the results are in the store to which these connections lead."""
        return self.place.connections is connections

    @contextmanager
    def riding(self) -> Iterator[list[Riding]]:
        """Collect what is to be kept and counted within the block, for a commit of the caller's."""
        riders: list[Riding] = []
        with native.within(RIDERS, riders):
            yield riders

    def forget_with(self, executor: Transaction, task_ids: Sequence[str]) -> None:
        """Remove the results of some tasks in a transaction of the caller's."""
        results.forget(executor, [self.get_key_for_task(task_id) for task_id in task_ids])

    def _keep(self, result: Kept, *, replaces: bool = False) -> None:
        riders = RIDERS.get()
        if riders is not None and not replaces:
            riders.append(Riding(self, result, None))
            return
        self._patiently(f"The result {result.key}", lambda: self.place.keep(result, replaces=replaces))

    def _patiently(self, what: str, work: Callable[[], T]) -> T:
        return patiently(work, () if self.always_retry else PAUSES_S, what)

    def again(self, what: str, work: Callable[[], T], *, until: float = inf) -> T:
        """Return what `work` returns; while Postgres is away, try again as `result_backend_always_retry` says.

        No pause is longer than `until`; then `work` must raise another error.
        """
        tries = takewhile(lambda number: number <= self.max_retries, count(1) if self.always_retry else ())
        base_ms, most_ms = self.base_sleep_between_retries_ms, self.max_sleep_between_retries_ms
        pauses_s = (get_exponential_backoff_interval(base_ms, number, most_ms, True) / 1000 for number in tries)
        return patiently(work, (max(0.0, min(pause_s, until - monotonic())) for pause_s in pauses_s), what)

    def _lifetime(self, expires: Any) -> float | None:
        """Return after how many seconds a result expires; None for never."""
        return min(float(expires), LONGEST_S) if expires else None

    # -- chords ----------------------------------------------------------------------------------------------------

    def apply_chord(self, header_result_args: Any, body: Any, **_: Any) -> None:
        """Keep the structure of the header, if its parts are not all single tasks, for the arguments of the body."""
        if isinstance(header_result_args[1], _regen):
            return
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(part, GroupResult) for part in header.results):
            header.save(backend=self)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Set the number of parts, before the last part is sent."""
        set_size = partial(chords.set_size, chord=storable(group_id), size=chord_size, expires_s=self._chord_s)
        self._patiently(f"The size of chord {group_id}", lambda: self.place.do("chord-size", set_size))

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Add a part to a chord, of which some parts may be counted."""
        add = partial(chords.add, chord=storable(chord_id), expires_s=self._chord_s)
        self._patiently(f"A part of chord {chord_id}", lambda: self.place.do("chord-size", add))

    def mark_as_done(self, task_id: str, result: Any, request: Any = None, *args: Any, **options: Any) -> None:
        """Keep a result, and count the part of a chord with it."""
        _counts(request)
        super().mark_as_done(task_id, result, request, *args, **options)

    def mark_as_failure(
        self, task_id: str, exc: Any, traceback: Any = None, request: Any = None, *args: Any, **options: Any
    ) -> None:
        """Keep a failure, and count the part of a chord with it."""
        _counts(request)
        super().mark_as_failure(task_id, exc, traceback, request, *args, **options)

    def mark_as_revoked(self, task_id: str, reason: Any = "", request: Any = None, *args: Any, **options: Any) -> None:
        """Keep that a task was revoked, and count the part of a chord with it."""
        _counts(request)
        super().mark_as_revoked(task_id, reason, request, *args, **options)

    def _keep_with_part(self, result: Kept, request: Any, value: Any, state: str) -> bool:
        """Keep the result of a part of a chord, and count it; False if the task is none, or has not ended."""
        if request is None or not vars(request).get("sidejob_counts") or state not in states.READY_STATES:
            return False
        request.sidejob_counts = _Counted(self._count(self._part(request, state, value), result))
        return True

    def on_chord_part_return(self, request: Any, state: str, result: Any, **_: Any) -> None:
        """Count a part, unless it was counted with its result; send the body if it was the last one."""
        if not request.group or not request.id:
            return
        counted = vars(request).pop("sidejob_counts", None)
        if not isinstance(counted, _Counted):
            counted = _Counted(self._count(self._part(request, state, result), None))
        if counted.owed is not None:
            self.send_body(counted.owed)

    def _count(self, part: Part, result: Kept | None) -> Owed | None:
        riders = RIDERS.get()
        if riders is not None:
            riders.append(Riding(self, result, part))
            return None
        return self._patiently(f"The end of part {part.task_id}", lambda: self.place.count(part, result))

    def _part(self, request: Any, state: str, value: Any) -> Part:
        index = request.group_index
        task = self.app._tasks.get(request.task)
        body = self._part_body(request.id, state, value)
        error = self._too_large(request.id, state, len(body))
        if error is not None:
            body = self._part_body(request.id, states.FAILURE, error)
        return Part(
            storable(bytes_to_str(request.group)),
            storable(bytes_to_str(request.id)),
            inf if index is None else float(index),
            body,
            _packed(request.chord, getattr(task, "serializer", None) or self.app.conf.task_serializer),
            self._chord_s,
        )

    def _part_body(self, task_id: str, state: str, value: Any) -> bytes:
        body: bytes = ensure_bytes(self.encode([1, task_id, state, self.encode_result(value, state)]))
        return body

    @property
    def _chord_s(self) -> float | None:
        # Before Celery 5.7 there was no setting of chords' own.
        return self._lifetime(getattr(self, "chord_expires", self.expires))

    # -- the body --------------------------------------------------------------------------------------------------

    def send_late_bodies(self, *, limit: int = 100) -> int:
        """Send the bodies of chords whose last process has died before it could; return their number."""
        late = self.place.do("chord-claim", partial(chords.claim_late, limit=limit))
        for owed in late:
            self.send_body(owed)
        return len(late)

    def send_body(self, owed: Owed) -> None:
        """Send the body of a chord, or tell of the chord's failure, and forget the chord.

        If the store or the broker is away, the sweeper does so later.
        """
        try:
            self._send_body(owed, self._signature(owed))
        except AWAY as error:
            logger.warning("The body of chord %s is not sent yet, and tried again: %s", owed.chord, error)

    def _send_body(self, owed: Owed, body: Any) -> None:
        try:
            values = self._values(owed.chord)
        except AWAY:
            raise
        except Exception as error:
            logger.exception("Chord %r raised: %r", owed.chord, error)
            self._fail(owed, body, error if isinstance(error, ChordError) else ChordError(f"Join error: {error!r}"))
            return
        try:
            sidejob = getattr(self.app, "sidejob", None)
            is_store = sidejob is not None and self.is_in(sidejob.runtime.connections)
            if not is_store or not self._send_with_commit(owed, values):
                self._send_apart(owed, body, values)
        except AWAY:
            raise
        except Exception as error:
            logger.exception("Chord callback for %r raised: %r", owed.chord, error)
            self._fail(owed, body, ChordError(f"Callback error: {error!r}"))

    def _send_with_commit(self, owed: Owed, values: list[Any]) -> bool:
        """Send the body in the commit that forgets the chord; False if the body is sent by another server."""
        try:
            self.place.forget_chord(
                owed, with_=lambda lent: self._signature(owed).apply_async((values,), transaction=lent)
            )
        except InvalidValueError:  # the broker is another server, or the body is refused, as it will be again
            return False
        return True

    def _send_apart(self, owed: Owed, body: Any, values: list[Any]) -> None:
        renewed = self.place.do("chord-claim", partial(chords.renew, owed=owed, for_s=APART_S))
        if renewed is None:
            return
        body_id = body.options.get("task_id")
        if not owed.again or body_id is None or self.get_state(body_id) == states.PENDING:
            getattr(self.app.amqp, "_retry_publish", operator.call)(body.delay, values)
        self.place.forget_chord(renewed)

    def _fail(self, owed: Owed, body: Any, error: ChordError) -> None:
        """Tell of a chord's failure; called while its error is handled. After a death the errbacks are called again."""
        self.chord_error_from_stack(body, error)
        self.place.forget_chord(owed)

    def _values(self, chord: str) -> list[Any]:
        """Return the results of a chord's parts, in the structure of its header; ChordError if a part has failed."""
        header = GroupResult.restore(chord, backend=self, app=self.app)
        if header is None:
            return [self._value(part) for part in self.place.connections.read(partial(chords.parts, chord=chord))]
        header.on_ready()
        try:
            with allow_join_result():
                values: list[Any] = header.join_native(timeout=self.app.conf.result_chord_join_timeout, propagate=True)
        except CeleryTimeoutError as error:
            if isinstance(error.__cause__, StoreUnavailableError):  # which is no failure of the chord
                raise error.__cause__ from None
            raise
        return values

    def _value(self, part: bytes) -> Any:
        _, task_id, state, value = self.decode(part)
        if state in states.EXCEPTION_STATES:
            value = self.exception_to_python(value)
        if state in states.PROPAGATE_STATES:
            raise ChordError(f"Dependency {task_id} raised {value!r}") from value
        return value

    def _signature(self, owed: Owed) -> Any:
        return maybe_signature(_unpacked(owed.call, self.app.conf.accept_content), app=self.app)


def _counts(request: Any) -> None:
    """Have the part of a chord counted with its result, which is kept next."""
    if request:  # a header may have the same name
        request.sidejob_counts = bool(request.chord and request.group)


def _packed(call: Any, serializer: str) -> bytes:
    content_type, encoding, data = serialization.dumps(dict(call), serializer=serializer)
    return b"\n".join([ensure_bytes(content_type), ensure_bytes(encoding), ensure_bytes(data)])


def _unpacked(packed: bytes, accept: Any) -> Any:
    content_type, encoding, data = packed.split(b"\n", 2)
    return serialization.loads(
        data, bytes_to_str(content_type), bytes_to_str(encoding), accept=serialization.prepare_accept_content(accept)
    )


def patiently(work: Callable[[], T], pauses_s: Iterable[float], what: str) -> T:
    """Return what `work` returns; while Postgres is away, try again after each of these pauses."""
    for pause_s in pauses_s:
        try:
            return work()
        except StoreUnavailableError as error:
            logger.warning("%s must wait: %s", what, error)
            time.sleep(pause_s)
    return work()

"""Celery's result backend behind the URL `sidejobpg://`: one row of our schema for each result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, takewhile
from math import inf
from time import monotonic
from typing import Any

from celery import states
from celery.backends.asynchronous import AsyncBackendMixin
from celery.utils.time import get_exponential_backoff_interval
from kombu.utils.encoding import bytes_to_str, ensure_bytes

from ..model import native
from ..model.errors import ResultTooLargeError, StoreUnavailableError
from ..model.logger import logger
from ..model.names import storable
from ..model.urls import SCHEME, is_alone, without_password
from ..store import results
from ..store.connection.connections import Connections
from ..store.results import Kept
from ..store.statement import Transaction
from .chords import RIDERS, Riding, StoredChords, T, patiently
from .waiting import ResultConsumer, add_awaited_calls

MOST_BYTES = 100_000_000
"""The most bytes of a result in its encoded form, as of the arguments of a durable task."""
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 5.0, 5.0)
"""The pauses between the attempts to keep a result while Postgres is away, such as during a restart."""
LONGEST_S = 1e9
"""The longest time for which a result is kept, in seconds, unless it is kept for ever: thirty years."""


class PostgresBackend(StoredChords, AsyncBackendMixin):  # type: ignore[misc]
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

    def as_uri(self, include_password: bool = False) -> str:
        """Return the URL for people, or with its password."""
        if is_alone(self.url):
            return f"{SCHEME}://"
        return self.url if include_password else without_password(self.url, "**")

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        """Tell whether it is worth to try again: after an error of the connection it is."""
        return isinstance(exc, StoreUnavailableError)

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

    def _patiently(self, what: str, work: Callable[[], Any]) -> Any:
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

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url, "expires": self.expires})

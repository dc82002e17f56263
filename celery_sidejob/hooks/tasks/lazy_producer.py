"""A producer of Celery's pool that is taken when it is first used: a message that is kept needs none.

To take one from the pool and give it back costs a tenth of a call.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from celery import Celery


class LazyProducer:
    """Stands for a producer for as long as one task is sent; `close` gives back what was taken."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._taken: Any = None
        self.connection = LazyConnection(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.take(), name)

    @property
    def is_taken(self) -> bool:
        """Whether it was used."""
        return self._taken is not None

    def take(self) -> Any:
        """Return the producer; it is taken from the pool if this is its first use."""
        if self._taken is None:
            timeout = self._app.conf.get("broker_pool_acquire_timeout")  # which Celery 5.5 does not have
            self._taken = self._app.producer_pool.acquire(block=True, timeout=timeout)
        return self._taken

    def close(self) -> None:
        """Give the producer back, if it was taken."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()


class LazyConnection:
    """Stands for the producer's connection, whose errors Celery asks for around each message that it sends."""

    def __init__(self, producer: LazyProducer) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer.take().connection, name)

    def _reraise_as_library_errors(self, *_: Any, **__: Any) -> LazyConnection:
        return self

    def __enter__(self) -> None:
        """Nothing is asked of a connection that may never be there."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._producer.is_taken:
            with self._producer.take().connection._reraise_as_library_errors():
                raise error

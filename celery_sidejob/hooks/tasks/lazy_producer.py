"""A producer of Celery's pool that is taken when it is first used: a message that is kept needs none.

Taking a producer from the pool and giving it back costs a tenth of a call.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from celery import Celery


class LazyProducer:
    """Stands for a producer while one task is sent; `close` gives a taken producer back."""

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
        """Return the producer; the first use takes it from the pool."""
        if self._taken is None:
            timeout = self._app.conf.get("broker_pool_acquire_timeout")  # Celery 5.5 does not have this setting
            self._taken = self._app.producer_pool.acquire(block=True, timeout=timeout)
        return self._taken

    def close(self) -> None:
        """Give the producer back, if it was taken."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.release()


class LazyConnection:
    """Stands for the producer's connection, which Celery asks for its errors around each message that it sends."""

    def __init__(self, producer: LazyProducer) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer.take().connection, name)

    def _reraise_as_library_errors(self, *_: Any, **__: Any) -> LazyConnection:
        return self

    def __enter__(self) -> None:
        """Ask nothing of a connection that may never exist."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._producer.is_taken:
            with self._producer.take().connection._reraise_as_library_errors():
                raise error

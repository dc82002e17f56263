"""Connections that break if their server accepts no writes: a new connection may find another server, or a healthy one.

kombu reports such an answer as a channel error, which ends Celery's workers, and a publisher does not try again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError

try:
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError:  # before redis-py 7, which has none
    WITHOUT_NOTICES: dict[str, Any] = {}
else:
    WITHOUT_NOTICES = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
"""Where notices of maintenance may come, a pool of redis-py 8 gives out connections with an answer nobody has read."""

DEMOTED = ("UNBLOCKED", "-READONLY")
"""What a server says that has become a replica: to who waited; in a script, where Redis 6.2 puts words before it."""
REFUSED = ("NOREPLICAS", "MISCONF")
"""What a master says that has too few replicas (`min-replicas-to-write`), or cannot save what it has."""


def breaking(kind: Any, *, before_closing: Callable[[Any], None] | None = None) -> Any:
    """Return a class of connections like this one that break if the server accepts no writes.

    `before_closing` is given the socket of a connection that is about to be closed by the process that opened it. The
    class is not kept: kombu makes `kind` for each channel, and that class knows its channel.
    """

    class Connection(kind):
        def disconnect(self, *args: Any, **options: Any) -> None:
            if before_closing is not None and self._sock is not None and self.pid == os.getpid():
                before_closing(self._sock)
            super().disconnect(*args, **options)

        def connect_check_health(self, *args: Any, **options: Any) -> None:
            try:
                super().connect_check_health(*args, **options)
            except BaseException:  # a time limit strikes: it would stay open, with another database and user
                self.disconnect()
                raise

        def read_response(self, *args: Any, **options: Any) -> Any:
            try:
                return super().read_response(*args, **options)
            except ResponseError as error:
                _raise_if_broken(error)
                raise
            except BaseException:  # a time limit strikes; redis-py's connections by sentinels stay open with the answer
                if options.get("disconnect_on_error", True):
                    self.disconnect()
                raise

    return Connection


@contextmanager
def unless_full() -> Iterator[None]:
    """Go on behind the block if the server is full and refuses a write, which would end Celery's worker.

    That worker may be the one that drains the server.
    """
    try:
        yield
    except ResponseError as error:
        if "maxmemory" not in str(error):  # redis-py before 5 has no class for it, and a script's error has another one
            raise


def has_come(connection: Any) -> bool:
    """Tell whether there is anything to be read; raises the connection's error if the server has hung up."""
    return connection is not None and connection._sock is not None and bool(connection.can_read(timeout=0))


def connected(connection: Any) -> Any:
    """Return a connection that is open.

    redis-py 8 opens one that something is sent over past `connect`: where sentinels are to be asked which server is the
    master, that is a Redis at port 6379 of this machine.
    """
    if connection._sock is None:
        connection.connect()
    return connection


def _raise_if_broken(error: ResponseError) -> None:
    said = str(error)
    if isinstance(error, ReadOnlyError) or any(word in said for word in DEMOTED):
        raise RedisConnectionError(f"the server is a replica now and accepts no writes ({said})") from error
    if any(word in said for word in REFUSED):
        raise RedisConnectionError(f"the server accepts no writes for now ({said})") from error

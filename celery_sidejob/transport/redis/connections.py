"""Connections that break if their server accepts no writes: a new connection may find a better server.

kombu reports such an answer as a channel error, which ends Celery's workers, and after which a publisher gives up.

A channel keeps a connection of its own for publishing, a `Line`. redis-py's client takes a connection out of its pool
for each command, checks it, and puts it back. This takes a third of the time that Redis takes to answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError

from .scripts import Script

try:
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError:  # before redis-py 7, which does not have it
    WITHOUT_NOTICES: dict[str, Any] = {}
else:
    WITHOUT_NOTICES = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
"""If notices of maintenance may come, a pool of redis-py 8 gives out connections with an unread answer."""

DEMOTED = ("UNBLOCKED", "-READONLY")
"""The errors of a server that has become a replica: to a waiting client, and in a script, where Redis 6.2 adds a
prefix."""
REFUSED = ("NOREPLICAS", "MISCONF")
"""The errors of a master that has too few replicas (`min-replicas-to-write`), or cannot save its data."""


def breaking(kind: Any, *, before_closing: Callable[[Any], None] | None = None) -> Any:
    """Return a class of connections like this one that break if the server accepts no writes.

    `before_closing` gets the socket of a connection that the process which opened it is about to close. The class is
    not cached: kombu makes a `kind` for each channel, which refers to its channel.
    """

    class Connection(kind):
        def disconnect(self, *args: Any, **options: Any) -> None:
            if before_closing is not None and self._sock is not None and self.pid == os.getpid():
                before_closing(self._sock)
            super().disconnect(*args, **options)

        def connect_check_health(self, *args: Any, **options: Any) -> None:
            try:
                super().connect_check_health(*args, **options)
            except BaseException:  # a time limit strikes: it would stay open, with the wrong database and user
                self.disconnect()
                raise

        def read_response(self, *args: Any, **options: Any) -> Any:
            try:
                return super().read_response(*args, **options)
            except ResponseError as error:
                _raise_if_broken(error)
                raise
            except BaseException:  # a time limit strikes; connections by sentinels stay open with the answer
                if options.get("disconnect_on_error", True):
                    self.disconnect()
                raise

    return Connection


@contextmanager
def unless_full() -> Iterator[None]:
    """Continue after the block if the server is full and refuses a write, which would end Celery's worker.

    That worker may be the worker that drains the server.
    """
    try:
        yield
    except ResponseError as error:
        if "maxmemory" not in str(error):  # redis-py before 5 has no class for it, and a script's error another
            raise


def has_come(connection: Any) -> bool:
    """Tell whether there is data to read; raises the connection's error if the server has hung up."""
    return connection is not None and connection._sock is not None and bool(connection.can_read(timeout=0))


def connected(connection: Any) -> Any:
    """Return a connection that is open.

    redis-py 8 opens a closed connection when something is sent, bypassing `connect`: with sentinels, which must name
    the master first, this would connect to a Redis at port 6379 of this machine.
    """
    if connection._sock is None:
        connection.connect()
    return connection


class Line:
    """Runs scripts over one connection that it opens with `connect`; a forked process opens its own."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._connection: Any = None
        self._forget()

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any], *, client: Any) -> Any:
        """Run a script and return its answer.

        Uses `client` while another thread has the connection, and if Redis has closed it. As with any redis-py client
        that tries again, a script whose answer was lost may then run twice.
        """
        if self._pid != os.getpid():
            self._forget()
        if not self._lock.acquire(blocking=False):
            return script.run(client, keys, arguments)
        try:
            return script.run(self, keys, arguments)
        except RedisConnectionError:
            self._hang_up()
        except ResponseError:
            raise
        except BaseException:  # at a time limit, perhaps with half an answer read
            self._hang_up()
            raise
        finally:
            self._lock.release()
        return script.run(client, keys, arguments)

    def close(self) -> None:
        """Close the connection; a later script opens it again."""
        if self._pid == os.getpid():
            self._hang_up()

    def execute_command(self, *command: Any) -> Any:
        """Send a command and return its answer, as a client does."""
        if self._connection is None:
            self._connection = self._connect()
        connection = connected(self._connection)
        connection.send_command(*command)
        return connection.read_response()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection = None


def _raise_if_broken(error: ResponseError) -> None:
    said = str(error)
    if isinstance(error, ReadOnlyError) or any(word in said for word in DEMOTED):
        raise RedisConnectionError(f"the server is a replica now and accepts no writes ({said})") from error
    if any(word in said for word in REFUSED):
        raise RedisConnectionError(f"the server accepts no writes for now ({said})") from error

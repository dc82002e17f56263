"""A connection that a channel keeps for publishing.

redis-py's client takes a connection out of its pool for each command, checks it, and puts it back. This
takes a third of the time that Redis takes to answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, ResponseError

from .connections import connected
from .scripts import Script


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
            return self._say(script, keys, arguments)
        except ConnectionError:
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

    def _say(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        if self._connection is None:
            self._connection = self._connect()
        connection = connected(self._connection)
        try:
            connection.send_command(*script.command(keys, arguments))
            return connection.read_response()
        except NoScriptError:
            connection.send_command(*script.command(keys, arguments, by_text=True))
            return connection.read_response()

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection = None

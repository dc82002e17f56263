"""The Redis scripts in `lua/`: sent by their hash, and as text to a server that does not know them yet.

A channel keeps a connection of its own for publishing. redis-py's client takes a connection out of its pool for each
command, checks it, and puts it back. This takes a third of the time that Redis takes to answer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.exceptions import ConnectionError, NoScriptError, ResponseError

from .connections import connected


class Script:
    """One script; its head describes `KEYS` and `ARGV`."""

    def __init__(self, name: str) -> None:
        self.text = files(__package__).joinpath("lua", f"{name}.lua").read_text()
        self.sha = sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str], arguments: Sequence[Any], *, by_text: bool = False) -> list[Any]:
        """Return the command that runs it; with the text it always works, and Redis then knows the hash."""
        head = ["EVAL", self.text] if by_text else ["EVALSHA", self.sha]
        return [*head, len(keys), *keys, *arguments]

    def run(self, client: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run it and return its answer, even on a server that was restarted or promoted by a failover."""
        try:
            return client.execute_command(*self.command(keys, arguments))
        except NoScriptError:
            return client.execute_command(*self.command(keys, arguments, by_text=True))


PUT = Script("put")
FETCH = Script("fetch")
GIVE_BACK = Script("give_back")
BEAT = Script("beat")
BOUND_DEAD = Script("bound_dead")
WAIT = Script("wait")
DELIVER_AGAIN = Script("deliver_again")


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

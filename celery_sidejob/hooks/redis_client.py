"""What is said to Redis on a channel of kombu's: by one client, and without waiting where nothing hangs on the answer.

kombu makes a new client for each command, which takes longer than to send it (0.2 ms): publishing has one, a delivery
two, for what is noted at its arrival and taken back at its acknowledgement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.utils.json import dumps


def keep_client(channel: Any) -> None:
    """Have the channel make a client once for each pool of connections that it opens; does nothing to other brokers'.

    A client has no state but its pool, which kombu shares between them as it is.
    """
    make = getattr(channel, "_create_client", None)
    if make is None:
        return
    kept: Any = None

    def create(asynchronous: bool = False) -> Any:
        nonlocal kept
        if asynchronous:  # a channel has one of these, and keeps it
            return make(asynchronous=True)
        if kept is None or kept.connection_pool is not channel.pool:
            kept = make()
        return kept

    channel._create_client = create


class Withheld(Exception):
    """A message is not to be sent after all."""


class Pushes:
    """Puts the messages of one channel into their lists, each as its caller goes on: `hear` receives the answer later.

    Redis has the command whole when `put` returns, and runs it though this process should die. `may_go` is asked just
    before that: until then kombu makes the message while Postgres keeps its row.
    """

    def __init__(self, channel: Any, may_go: Callable[[], bool]) -> None:
        self._channel = channel
        self._may_go = may_go
        self._put_and_wait = channel._put
        self._connection: Any = None
        self._owes = False
        channel._put = self.put

    def put(self, queue: str, message: Any, **options: Any) -> None:
        """Send one message; with kombu's batches, expiring queues and prefixed keys as kombu does."""
        channel = self._channel
        if not self._may_go():
            raise Withheld
        if (
            options.get("_publish_batch") is not None
            or getattr(channel, "global_keyprefix", None)
            or queue in (getattr(channel, "_expires", None) or ())
        ):
            self._put_and_wait(queue, message, **options)
            return
        self.hear()
        if self._connection is None:
            self._connection = channel.pool.make_connection()
        elif self._has_hung_up():
            self._connection.disconnect()
        key = channel._q_for_pri(queue, channel._get_message_priority(message, reverse=False))
        self._connection.send_command("LPUSH", key, dumps(message))
        self._owes = True

    def _has_hung_up(self) -> bool:
        """Tell whether Redis has said something: nothing is owed, so that can only be a goodbye."""
        try:
            return self._connection._sock is not None and bool(self._connection.can_read(0))
        except Exception:
            return True

    def hear(self) -> None:
        """Wait for the answer that is owed, if one is; raises what Redis has against it."""
        if self._owes:
            self._owes = False
            self._connection.read_response()

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        self._owes = False
        if connection is not None:
            connection.disconnect()

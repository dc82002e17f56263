"""Puts messages into Redis over a connection of its own, without waiting for each answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

from kombu.utils.json import dumps

from ..patches import redis_put


def list_of(channel: Any, queue: str, message: Any) -> str:
    """Return the key of the list into which a channel of kombu's puts a message: one for each step of priority."""
    key: str = channel._q_for_pri(queue, channel._get_message_priority(message))
    return key


def pushes_of(channel: Any) -> Pushes | None:
    """Return what sends the messages of a channel without waiting; None where a project's own puts them in its way."""
    return Pushes(channel) if redis_put.can_be_replaced(channel) else None


class Pushes:
    """Puts the messages of one channel into their lists, each as its caller goes on: `hear` receives the answer later.

    Redis has the command whole when `push` returns, and runs it though this process should die.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        # That of our own transport rings a bell as well (transport/redis/broker_channel.py).
        self._command = getattr(channel, "push_command", lambda key, *messages: ("LPUSH", key, *messages))
        self._put_and_wait = redis_put.replace_put(channel, self._put)
        self._connection: Any = None
        self._owes = 0
        self._made: list[tuple[str, str]] | None = None

    @contextmanager
    def made_only(self) -> Iterator[list[tuple[str, str]]]:
        """Have what is put within the block only made, and not sent: what `push` takes.

        Each message is the key of a list and what is put there. One that takes more than that is left out.
        """
        made: list[tuple[str, str]] = []
        self._made = made
        try:
            yield made
        finally:
            self._made = None

    def push(self, made: Sequence[tuple[str, str]]) -> None:
        """Send messages in order, over another connection where Redis has hung up.

        Those for one list that follow each other are one command. If Redis hangs up just then, `hear` tells.
        """
        commands = [self._command(key, *(data for _, data in of_key)) for key, of_key in groupby(made, itemgetter(0))]
        packed = self._connected().pack_commands(commands)
        self.hear()
        if self._has_hung_up():
            self._connection.disconnect()
        self._connected().send_packed_command(packed)
        self._owes = len(commands)

    def hear(self) -> None:
        """Wait for the answers that are owed, if any are; raises what Redis has against the first that it refuses."""
        refusal = None
        while self._owes:
            self._owes -= 1
            try:
                self._connection.read_response()
            except BaseException as error:
                if self._connection._sock is None:  # nor is there another answer
                    self._owes = 0
                    raise
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        self._owes = 0
        if connection is not None:
            connection.disconnect()

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """Take a message from kombu: with its batches, expiring queues and prefixed keys it is sent as kombu does."""
        channel = self._channel
        if (
            options.get("_publish_batch") is not None
            or getattr(channel, "global_keyprefix", None)
            or queue in (getattr(channel, "_expires", None) or ())
        ):
            if self._made is None:
                self._put_and_wait(queue, message, **options)
            return
        key = list_of(channel, queue, message)
        if self._made is not None:
            self._made.append((key, dumps(message)))
        else:
            self.push([(key, dumps(message))])

    def _connected(self) -> Any:
        if self._connection is None:
            self._connection = self._channel.pool.make_connection()
        if self._connection._sock is None:  # redis-py 8 would ask no sentinel, but a Redis at port 6379 of this machine
            try:
                self._connection.connect()
            except BaseException:  # a time limit strikes: it would stay open, with another database and user
                self._connection.disconnect()
                raise
        return self._connection

    def _has_hung_up(self) -> bool:
        """Tell whether Redis has said something: nothing is owed, so that can only be a goodbye."""
        try:
            return self._connection._sock is not None and bool(self._connection.can_read(0))
        except Exception:
            return True

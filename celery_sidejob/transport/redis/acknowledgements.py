"""Acknowledgements are sent at once, and their answers are read together later: no task waits for Redis.

This is for workers with an event loop, which soon returns to its channel. Consumers without a loop (kombu's own, the
pool gevent) wait for each answer, as before.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from kombu.transport import redis, virtual
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from .connections import connected, unless_full
from .records import parted

FAILURES = (ConnectionError, TimeoutError, OSError)
"""The errors of a lost connection."""
AT_MOST = 100
"""The most outstanding answers; the next acknowledgement waits for them."""


class Acknowledgements:
    """The acknowledgements of one channel, on their own connection.

    Each is a delivery tag, and what the consumer does with the message: ack or reject.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._lock = threading.RLock()  # its receiver may make another acknowledgement
        self._pid = os.getpid()
        self._connection: Any = None
        self._owed: deque[tuple[str, str]] = deque()

    def write(self, delivery_tag: str, verb: str) -> None:
        """Send an acknowledgement: Redis executes it even if this process dies."""
        self._reset_after_fork()
        with self._lock:
            if len(self._owed) >= AT_MOST:
                self.settle()
            is_first = not self._owed
            self._owed.append((delivery_tag, verb))
            try:
                if not is_first:
                    self._check_open()
                elif self._connection is None:
                    self._connection = self._connect()
                connected(self._connection)
                command = self._channel.records.acknowledging(*parted(delivery_tag))
                self._connection.send_command(
                    *command, check_health=is_first
                )  # the next command would read this answer
            except FAILURES:
                self._write_again()
            except BaseException:  # at a time limit: perhaps half a command is written
                self._hang_up()
                raise

    def hear(self) -> None:
        """Read the answers that have arrived; announce the acknowledgements that Redis refused."""
        if self._owed:
            self._read(lambda connection: connection.can_read(timeout=0))

    def settle(self, *, within_s: float | None = None) -> None:
        """Wait for all answers: then no record contains an acknowledged message; TimeoutError if one takes longer."""
        if not self._owed:
            return
        if within_s is None:
            self._read(lambda connection: True)
            return
        deadline = monotonic() + within_s
        self._read(lambda connection: connection.can_read(timeout=max(0.0, deadline - monotonic())))
        if self._owed:
            raise TimeoutError(f"{len(self._owed)} acknowledgements had no answer within {within_s:g} s")

    def close(self) -> None:
        """Close the connection; outstanding answers are lost."""
        self._reset_after_fork()
        with self._lock:
            self._hang_up()
            self._owed.clear()

    # ------------------------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        return self._channel.pool.make_connection()

    def _read(self, is_there: Callable[[Any], bool]) -> None:
        self._reset_after_fork()
        with self._lock:
            while self._owed:
                try:
                    self._check_open()
                    if not is_there(self._connection):
                        return
                    was_held = self._heard()
                except FAILURES:
                    self._write_again()
                    return
                except BaseException:
                    self._hang_up()
                    raise
                delivery_tag, verb = self._owed.popleft()
                if not was_held:
                    self._channel.refuse(delivery_tag, verb)

    def _check_open(self) -> None:
        """Raise if answers are outstanding on a lost connection: redis-py would silently open another."""
        if self._connection is None or self._connection._sock is None:
            raise ConnectionError("the connection was left in the middle of a command or an answer")

    def _heard(self) -> bool:
        try:
            return bool(self._connection.read_response())
        except ResponseError:
            self._owed.popleft()  # it would be refused again
            raise

    def _write_again(self) -> None:
        """Repeat unanswered acknowledgements over another connection; it is then unknown which of them came too late.

        Raises the error of a failed connection; the acknowledgements then stay unanswered.
        """
        self._hang_up()
        while self._owed:
            self._channel.records.acknowledge(*parted(self._owed[0][0]))
            self._owed.popleft()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()

    def _reset_after_fork(self) -> None:
        if self._pid != os.getpid():  # both belong to the parent
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._connection = None
            self._owed = deque()


# -- kombu's view of them ----------------------------------------------------------------------------------------------


class QoS(redis.QoS):
    """kombu's QoS, with a record for each consumer instead of one hash for the whole broker.

    Messages of kombu's own workers in that hash are restored as before (`restore_visible`): during a migration the last
    of these workers may be killed.
    """

    def can_consume(self) -> bool:
        """Adds to kombu's: kombu calls it first, even while no more messages may be fetched."""
        self.channel.acknowledgements.hear()
        self.channel.consumer.check_silence()
        return not self.channel.quarantine.is_on(self) and bool(super().can_consume())

    def append(self, message: Any, delivery_tag: str) -> None:
        """Replaces recording a message in Redis: the fetch has done this."""
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Replaces removing a message regardless of its owner: needs the token of the current delivery."""
        self.channel.finish(delivery_tag, "ack")
        virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Replaces the same, and the requeue at the tail: the message goes to the head of its list.

        It goes behind messages that came back before, so that several keep their order.
        """
        if requeue:
            self.channel.send_back(delivery_tag)
        else:
            self.channel.finish(delivery_tag, "reject")
        virtual.QoS.ack(self, delivery_tag)

    def restore_visible(self, *args: Any, **options: Any) -> None:
        """Adds to kombu's: a full server refuses its lock, and the messages to restore wait."""
        with unless_full():
            super().restore_visible(*args, **options)

    def restore_unacked(self, client: Any = None) -> None:
        """Replaces giving back one by one, which reverses the order: gives back all of this channel's messages."""
        self.channel.leave()
        self._delivered.clear()
        self._dirty.clear()

"""Announcements over Postgres' NOTIFY, where there is no Redis: each batch is a commit of its own.

A channel's name may be longer than NOTIFY allows, so it is hashed together with the schema's name. A payload has less
than 8,000 bytes, so a longer message is sent in parts, all in one commit.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import select
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from ..model.errors import SettingsError, StoreUnavailableError
from ..model.logger import logger
from ..operations.audience import Audience
from ..store import audience
from ..store.connection.connections import Connections
from ..store.connection.own_executor import OwnExecutor
from .way import Message, Way

PIECE = 7000
"""The most bytes of a message in one payload."""
COMMIT_S = 5.0
"""How long a commit that notifies may take before it is given up, in seconds."""
SILENT_S = 30.0
"""After so many seconds of silence a listener asks whether the server still answers."""
MOST_PARTIAL = 64
"""The most messages with missing parts: the other parts of a message may never come."""

Open = Callable[[], OwnExecutor]


class PostgresWay(Way):
    """The store: `open_session` opens a connection past a proxy, where there is one.

    It needs no connection of its own to announce, because `hears` has already asked for listeners. After an error the
    store is tried again with the next announcement.
    """

    def __init__(self, connections: Connections, known: Audience, open_session: Open) -> None:
        self._connections = connections
        self._audience = known
        self._open_session = open_session
        self._sender = secrets.token_hex(4)
        self._numbers = itertools.count()

    def hears(self, channel: str, *, ask: bool = True) -> bool:
        """Tell whether any channel has a listener, over the connection of the preceding commit."""
        return self._audience.listens(ask=ask)

    def send(self, messages: Sequence[Message]) -> None:
        """Notify the listeners, in one commit; StoreUnavailableError if the server's queue of notifications is full."""
        schema = self._connections.schema
        payloads = [
            (name_of(schema, channel), payload)
            for channel, text in messages
            for payload in parts_of(f"{self._sender}{next(self._numbers):x}", text)
        ]
        if not self._connections.transact(
            "announce", lambda executor: audience.notify(executor, payloads), single=True, within_s=COMMIT_S
        ):
            raise StoreUnavailableError("The server's queue of notifications is too full.")

    def listen(self, channels: Sequence[str]) -> PostgresEar:
        """Listen over a separate session."""
        executor = self._open_session()
        try:
            if executor.pooled:
                raise SettingsError(
                    "subscribe() needs a session of its own, and sidejob_database_url leads through a proxy that pools "
                    "transactions: set sidejob_direct_url, or sidejob_redis_url for announcements over Redis."
                )
            return PostgresEar(executor, self._connections.schema, channels)
        except BaseException:
            executor.close()
            raise


class PostgresEar:
    """A session that listens."""

    def __init__(self, executor: OwnExecutor, schema: str, channels: Sequence[str]) -> None:
        self._executor = executor
        self._schema = schema
        self._channels = {name_of(schema, channel): channel for channel in channels}
        self._partial: dict[str, list[str]] = {}
        self._come: list[tuple[str, str]] = []
        self._heard_at = monotonic()
        audience.listen(executor, schema, list(self._channels), lambda *said: self._come.append(said))
        self._poll = select.poll()  # gevent's own under gevent, so that other greenlets go on
        self._poll.register(executor.connection.fileno(), select.POLLIN)

    def hear(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that have come."""
        if self._poll.poll(timeout_s * 1000):
            self._executor.take_in()
            self._heard_at = monotonic()
        elif monotonic() - self._heard_at >= SILENT_S:
            audience.ask(self._executor, self._schema)
            self._heard_at = monotonic()
        come, self._come[:] = list(self._come), []
        return [message for name, payload in come if (message := self._joined(name, payload)) is not None]

    def close(self) -> None:
        """Close the session."""
        self._executor.close()

    def _joined(self, name: str, payload: str) -> Message | None:
        """Return the message that this part completes; None if parts are still missing."""
        head, _, piece = payload.partition(" ")
        try:
            key, number, count = head.split(".")
            place, all_pieces = int(number), int(count)
        except ValueError:
            logger.warning("What somebody has notified on %s is left out: it is no announcement", self._channels[name])
            return None
        pieces = self._partial.setdefault(key, [])
        if len(pieces) != place:  # its beginning was missed
            del self._partial[key]
            return None
        pieces.append(piece)
        if len(pieces) == all_pieces:
            return self._channels[name], "".join(self._partial.pop(key))
        if len(self._partial) > MOST_PARTIAL:
            self._partial.pop(next(iter(self._partial)))
        return None


def name_of(schema: str, channel: str) -> str:
    """Return the name under which a channel is notified."""
    return "sidejob:" + hashlib.sha256(f"{schema} {channel}".encode()).hexdigest()[:48]


def parts_of(key: str, text: str) -> Iterator[str]:
    """Yield the payloads that carry a message. No two are equal: Postgres would pass on only one of them."""
    pieces = list(_pieces(text.encode()))
    for number, piece in enumerate(pieces):
        yield f"{key}.{number}.{len(pieces)} {piece}"


def _pieces(data: bytes) -> Iterator[str]:
    start = 0
    while start < len(data):
        piece = data[start : start + PIECE].decode(errors="ignore")  # without a part of a character at its end
        yield piece
        start += len(piece.encode())

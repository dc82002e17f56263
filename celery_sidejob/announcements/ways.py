"""The two ways by which announcements travel, Redis' pub/sub and Postgres' NOTIFY, and their common interface."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple, Protocol

from ..model.errors import SettingsError, StoreUnavailableError
from ..model.logger import logger
from ..model.names import CHANNELS_OF_JOBS, LOG_CHANNEL
from ..operations.audience import KNOWN_S, Audience
from ..store import audience
from ..store.connection.connections import Connections
from ..store.connection.own_executor import OwnExecutor

Message = tuple[str, str]
"""A channel, and a message as JSON text."""


class Ear(Protocol):
    """A client's subscription in the server; used by one thread."""

    def hear(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that have come, after at most this many seconds; raises if the connection is lost."""

    def close(self) -> None:
        """End the subscription; never raises."""


class Way:
    """A server that passes messages on. A subclass replaces the methods for which it has something to do."""

    def hears(self, channel: str, *, ask: bool = True) -> bool | None:
        """Tell whether a channel has a listener; None while that is unknown.

        Never raises, and never waits for the announcement server; without `ask` the store is not asked either.
        """
        return False

    def open(self) -> None:
        """Connect, if necessary. A process does not fork meanwhile."""

    def learn(self, channels: Iterable[str]) -> None:
        """Ask for listeners, if the last answer is too old or does not cover these channels."""

    def send(self, messages: Sequence[Message]) -> None:
        """Pass messages on, in order."""

    def fail(self) -> None:
        """Spare the server for a while after an error: until the next question there are no listeners. Never raises."""

    def close(self) -> None:
        """Close the connection; the next use opens another. Never raises."""

    def listen(self, channels: Sequence[str]) -> Ear:
        """Subscribe to channels by their exact names; StoreUnavailableError if the server does not answer."""
        raise NotImplementedError


class Nowhere(Way):
    """The way of a process whose settings are unusable: an attempt to listen raises the reason."""

    def __init__(self, reason: Exception) -> None:
        self._reason = reason

    def listen(self, channels: Sequence[str]) -> Ear:
        raise self._reason


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
    """NOTIFY in the store, where there is no Redis: each batch is a commit of its own.

    A channel's name may be longer than NOTIFY allows, so it is hashed together with the schema's name. A payload has
    less than 8,000 bytes, so a longer message is sent in parts, all in one commit. `open_session` opens a connection
    past a proxy, where there is one.

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


ANSWER_S = 1.0
"""How long Redis may take to answer, in seconds."""
LISTENING = "celery_sidejob:listening"
"""The channel to which every listener of any channel subscribes."""
MOST_ASKED = 1000
"""The most channels that are asked about within `KNOWN_S` if no listener is marked; further channels count as unheard.
"""


class Client(NamedTuple):
    """A client of redis-py, and the function that closes all its connections."""

    redis: Any
    close: Callable[[], None]


class RedisWay(Way):
    """Redis, which knows the subscribers: `connect` opens a client that waits at most `ANSWER_S` for an answer.

    A channel has the same name in Redis. A subscriber that uses this package also subscribes to a channel that marks
    listeners. So one question of constant cost tells whether there is any listener at all. Other clients of Redis need
    not know this: the question includes the channels on which a process is about to announce. It does not include each
    channel of a job, because there are as many as jobs.
    """

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._somebody = False
        self._heard: dict[str, bool] = {}
        self._until = float("-inf")

    def hears(self, channel: str, *, ask: bool = True) -> bool | None:
        """Tell whether a channel has a listener; None if the last answer is too old."""
        if monotonic() >= self._until:
            return None
        if self._somebody:
            return True
        return self._heard.get(channel, len(self._heard) < MOST_ASKED and not channel.startswith(CHANNELS_OF_JOBS))

    def open(self) -> None:
        """Connect."""
        if self._client is None:
            self._client = self._connect()

    def learn(self, channels: Iterable[str]) -> None:
        """Ask whether there is any listener, and which of these channels have one, unless that is known."""
        began = monotonic()
        if self._client is None or (self._somebody and began < self._until):
            return
        if began >= self._until:
            found = self._numbers(LISTENING, LOG_CHANNEL, *channels)
            self._somebody, self._heard = bool(found.pop(LISTENING)), found
            self._until = began + KNOWN_S
        elif unknown := [name for name in channels if name not in self._heard and self.hears(name) is not False]:
            self._heard.update(self._numbers(*unknown))

    def _numbers(self, *names: str) -> dict[str, bool]:
        """Return which of these channels have subscribers."""
        assert self._client is not None
        found = self._client.redis.pubsub_numsub(*dict.fromkeys(names))
        return {_text(name): number > 0 for name, number in found}

    def send(self, messages: Sequence[Message]) -> None:
        """Publish messages, in one round trip."""
        assert self._client is not None
        with self._client.redis.pipeline(transaction=False) as pipe:
            for channel, text in messages:
                pipe.execute_command("PUBLISH", channel, text.encode())
            pipe.execute()

    def fail(self) -> None:
        """Assume for a while that there is no listener, and close the connection."""
        self._somebody, self._heard = False, _Nobody()
        self._until = monotonic() + KNOWN_S
        self.close()

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                client.close()

    def listen(self, channels: Sequence[str]) -> RedisEar:
        """Subscribe over a separate connection."""
        client: Client | None = None
        try:
            client = self._connect()
            return RedisEar(client, channels)
        except BaseException as error:
            if client is not None:
                with suppress(Exception):
                    client.close()
            if isinstance(error, Exception) and not isinstance(error, StoreUnavailableError):
                raise StoreUnavailableError(
                    f"The Redis for announcements does not answer ({type(error).__name__}: {error}). Is it up, and is "
                    "sidejob_redis_url (or broker_url) right?"
                ) from error
            raise


class RedisEar:
    """A subscription in Redis; it is active once this object exists."""

    def __init__(self, client: Client, channels: Sequence[str]) -> None:
        self._client = client
        self._pubsub = client.redis.pubsub()
        self._pubsub.subscribe(LISTENING, *channels)
        missing, deadline = {LISTENING, *channels}, monotonic() + ANSWER_S
        self._early: list[Message] = []
        while missing:
            left_s = deadline - monotonic()
            if left_s <= 0:
                raise StoreUnavailableError("Redis does not answer a subscription in time.")
            found = self._pubsub.get_message(timeout=left_s)
            if found is not None and found["type"] == "subscribe":
                missing.discard(_text(found["channel"]))
            else:
                self._early += _message(found)

    def hear(self, timeout_s: float) -> Sequence[Message]:
        """Return the messages that have come."""
        early, self._early = self._early, []
        return early or _message(self._pubsub.get_message(timeout=timeout_s))

    def close(self) -> None:
        """Unsubscribe, and close the connection."""
        with suppress(Exception):
            self._pubsub.close()
        with suppress(Exception):
            self._client.close()


class _Nobody(dict[str, bool]):
    """Stands for the listeners while Redis does not answer: no channel has a listener."""

    def get(self, channel: str, default: Any = None) -> Any:
        return False


def _message(found: Any) -> list[Message]:
    if found is None or found["type"] != "message":
        return []
    return [(_text(found["channel"]), _text(found["data"]))]


def _text(found: Any) -> str:
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)

"""Announcements over Redis' pub/sub: a channel has the same name in Redis.

A subscriber that uses this package also subscribes to a channel that marks listeners. So one question of constant cost
tells whether there is any listener at all. Other clients of Redis need not know this: the question includes the
channels on which a process is about to announce. It does not include each channel of a job, because there are as many
as jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

from ..model.errors import StoreUnavailableError
from ..model.names import CHANNELS_OF_JOBS, LOG_CHANNEL
from ..operations.audience import KNOWN_S
from .way import Message, Way

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
    """Redis, which knows the subscribers: `connect` opens a client that waits at most `ANSWER_S` for an answer."""

    def __init__(self, connect: Callable[[float], Client]) -> None:
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
            self._client = self._connect(ANSWER_S)

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
        try:
            client = self._connect(ANSWER_S)
        except Exception as error:
            raise _no_answer(error) from error
        try:
            return RedisEar(client, channels)
        except BaseException as error:
            with suppress(Exception):
                client.close()
            if isinstance(error, Exception) and not isinstance(error, StoreUnavailableError):
                raise _no_answer(error) from error
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


def _no_answer(error: BaseException) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"The Redis for announcements does not answer ({type(error).__name__}: {error}). Is it up, and is "
        "sidejob_redis_url (or broker_url) right?"
    )

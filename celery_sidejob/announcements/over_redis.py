"""Announcements over Redis' pub/sub: a message is published on exactly the name of its channel.

Whoever subscribes with this package also subscribes to a channel that marks it. So one question of constant cost tells
whether anybody listens at all. Other clients of Redis need not know that: the channels that a process is about to
announce on are part of the question. Only of the channels of jobs, which are as many as jobs, not each is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from ..model.channel import LOG, OF_JOBS
from ..model.errors import StoreUnavailableError
from ..operations.audience import KNOWN_S
from .way import Message, Way

ANSWER_S = 1.0
"""Seconds that Redis is given to answer."""
LISTENING = "celery_sidejob:listening"
"""The channel that marks those who listen to any channel."""
MOST_ASKED = 1000
"""Channels that are asked about within `KNOWN_S`, if nobody is marked; nobody listens to further ones."""


class Client:
    """A client of redis-py, and how everything behind it is closed."""

    def __init__(self, redis: Any, close: Callable[[], None]) -> None:
        self.redis = redis
        self.close = close


class RedisWay(Way):
    """Redis, which tells who listens: `connect` opens a client whose answers are waited for `ANSWER_S`."""

    def __init__(self, connect: Callable[[float], Client]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._somebody = False
        self._heard: dict[str, bool] = {}
        self._until = float("-inf")

    def hears(self, channel: str, *, ask: bool = True) -> bool | None:
        """Tell whether somebody listens; None if the last answer is too old."""
        if monotonic() >= self._until:
            return None
        if self._somebody:
            return True
        return self._heard.get(channel, len(self._heard) < MOST_ASKED and not channel.startswith(OF_JOBS))

    def open(self) -> None:
        """Connect."""
        if self._client is None:
            self._client = self._connect(ANSWER_S)

    def learn(self, channels: Iterable[str]) -> None:
        """Ask whether anybody listens, and to which of these channels, unless that is known."""
        began = monotonic()
        if self._client is None or (self._somebody and began < self._until):
            return
        if began >= self._until:
            found = self._numbers(LISTENING, LOG, *channels)
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
        """Have nobody listen for a while, and close the connection."""
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
        """Subscribe over a connection of its own."""
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
    """A subscription in Redis; it is there when this is made."""

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
        """Return what has come."""
        early, self._early = self._early, []
        return early or _message(self._pubsub.get_message(timeout=timeout_s))

    def close(self) -> None:
        """Unsubscribe, and close the connection."""
        with suppress(Exception):
            self._pubsub.close()
        with suppress(Exception):
            self._client.close()


class _Nobody(dict[str, bool]):
    """What is known of channels while Redis does not answer: nobody listens to any."""

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

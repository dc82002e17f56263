"""The result of `sidejob.subscribe`: the announcements on some channels, in threads and in asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from ..model import values
from ..model.logger import logger
from ..operations.audience import KNOWN_S
from .ways import Ear, Message

SETTLED_S = KNOWN_S + 0.25
"""Seconds until every announcing process has asked for listeners and has the answer."""
LOOK_S = 0.5
AGAIN_S = 1.0
"""Seconds between two attempts to subscribe again after the connection was lost."""
MOST = 10_000
MOST_BYTES = 16_000_000
"""The most bytes of unread announcements; beyond that, the oldest are dropped."""


class Announcement(NamedTuple):
    """A message that was announced on a channel."""

    channel: str
    message: Any


class Subscription:
    """Iterates over the announcements on some channels: ``for channel, message in subscription``, or ``async for``.

    It listens from the moment it is made. Its own thread receives the announcements, so that a slow reader delays no
    other: `dropped` counts the announcements for which there was no room. Announcements that are made while the
    connection is lost are missed.
    """

    def __init__(
        self, listen: Callable[[Sequence[str]], Ear], channels: Sequence[str], *, timeout: float | None = None
    ) -> None:
        """`timeout`: how many seconds an iteration waits for the next announcement before it raises TimeoutError."""
        self.channels = tuple(channels)
        self.dropped = 0
        self._listen = listen
        self._timeout = timeout
        self._ear: Ear | None = listen(self.channels)
        self._messages: deque[tuple[Announcement, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._come = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._thread = threading.Thread(target=self._run, name="sidejob-subscription", daemon=True)
        self._thread.start()
        time.sleep(SETTLED_S)

    # -- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Announcement:
        with self._come:
            if not self._come.wait_for(lambda: self._messages or self._closed, self._timeout):
                raise self._late()
            found = self._taken()
        if found is None:
            raise StopIteration
        return found

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Announcement:
        loop = asyncio.get_running_loop()
        while True:
            with self._come:
                found = self._taken()
                if found is not None:
                    return found
                if self._closed:
                    raise StopAsyncIteration
                come = loop.create_future()
                self._waiting.append((loop, come))
            try:
                await asyncio.wait_for(come, self._timeout)
            except TimeoutError:
                raise self._late() from None
            finally:  # a caller that asks again and again must leave nothing behind each time
                with self._come:
                    self._waiting = [each for each in self._waiting if each[1] is not come]

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop listening. Announcements that were not read are dropped; iterations end."""
        with self._come:
            self._closed = True
            self._messages.clear()
            self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        await asyncio.to_thread(self.close)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                if self._ear is None:
                    self._ear = self._listen(self.channels)
                for message in self._ear.hear(LOOK_S):
                    self._put(message)
            except Exception as error:
                logger.warning("A subscription to %s is interrupted: %s", ", ".join(self.channels), error)
                self._drop_ear()
                with self._come:
                    self._come.wait_for(lambda: self._closed, AGAIN_S)
        self._drop_ear()

    def _drop_ear(self) -> None:
        ear, self._ear = self._ear, None
        if ear is not None:
            ear.close()

    def _put(self, message: Message) -> None:
        channel, text = message
        try:
            found = Announcement(channel, values.decode(text))
        except (ValueError, RecursionError) as error:  # any client of Redis or Postgres may publish on these channels
            logger.warning("What somebody has published on %s is left out, because it is no JSON: %s", channel, error)
            return
        with self._come:
            if self._closed:
                return
            self._messages.append((found, len(text)))
            self._bytes += len(text)
            while len(self._messages) > MOST or self._bytes > MOST_BYTES:
                self._taken()
                self.dropped += 1
            self._wake()

    def _taken(self) -> Announcement | None:
        if not self._messages:
            return None
        found, size = self._messages.popleft()
        self._bytes -= size
        return found

    def _wake(self) -> None:
        self._come.notify_all()
        waiting, self._waiting = self._waiting, []
        for loop, come in waiting:
            try:
                loop.call_soon_threadsafe(_set, come)
            except RuntimeError:  # the event loop of that iteration is closed
                continue

    def _late(self) -> TimeoutError:
        return TimeoutError(f"Nothing was announced on {', '.join(self.channels)} within {self._timeout:g} s.")


def _set(come: asyncio.Future[None]) -> None:
    if not come.done():
        come.set_result(None)

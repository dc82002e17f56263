"""Fetches of one channel, and deliveries of what they took.

A fetch has its queues, a number of messages, and an answer. In a delivery each fetched text becomes kombu's message,
for the consumer of its queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kombu.log import get_logger
from kombu.utils.json import loads
from kombu.utils.scheduling import priority_cycle, round_robin_cycle
from redis.exceptions import NoScriptError

from ..decoding import NotAMessageError, made
from ..quarantine import SUSPECT, is_for_later, returns
from .records import BELL_MS, parted, tag_of
from .scripts import FETCH

logger = get_logger(__name__)

AT_MOST = 32
"""The most messages that one fetch takes."""
LOOK_AT_ONCE = 1000
"""How many queues one fetch checks, because Redis does nothing else meanwhile. With more queues it checks pages."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch whose answer is outstanding."""

    consumer: str
    number: int
    queues: Sequence[str]


@dataclass(frozen=True, slots=True)
class Taken:
    """A fetched message."""

    queue: str
    text: bytes
    tag: str | None
    """The delivery tag; None if no acknowledgement is expected, so nothing is recorded."""


class Fetching:
    """The state of one channel's fetches."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.unrecorded: set[str] = set()
        """The consumed queues whose messages are not acknowledged."""
        self.is_idle = False
        """Whether the last fetches found all queues empty, so that the channel waits for a bell."""
        self.is_buffered = False
        """Whether the last delivered message waits in a Celery worker."""
        self.knows_scripts = True
        self._number = 0
        self._page = 0
        self._barren_pages = 0

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask(self, queues: Sequence[str], room: int) -> tuple[Fetch, list[Any]]:
        """Return the next fetch and its command; each fetch of a channel has its own number."""
        channel = self._channel
        consumer = self._channel.consumer.registered(records=not self.unrecorded.issuperset(queues))
        self._number += 1
        lists = [
            channel.keys.kombu_list(channel._q_for_pri(queue, step))
            for step in channel.priority_steps
            for queue in queues
        ]
        unrecorded = "".join("1" if queue in self.unrecorded else "0" for queue in queues)
        keys = [channel.keys.consumers, channel.keys.held(consumer), *lists, *channel.keys.bells(queues)]
        arguments = [
            consumer,
            self._number,
            room,
            round(channel.consumer_timeout * 1000),
            len(queues),
            len(channel.priority_steps),
            int(self._rotates),
            unrecorded,
            BELL_MS,
        ]
        by_text, self.knows_scripts = not self.knows_scripts, True
        return Fetch(consumer, self._number, list(queues)), FETCH.command(keys, arguments, by_text=by_text)

    def page_of(self, queues: Sequence[str]) -> Sequence[str]:
        """Return the queues that the next fetch checks."""
        first = self._page * LOOK_AT_ONCE
        if first >= len(queues):
            self._page = first = 0
        return queues[first : first + LOOK_AT_ONCE]

    @property
    def room(self) -> int:
        """How many messages may be fetched: several only if a prefetch asks for so many.

        One if messages are executed as they are handed over (the pool solo), so that others need not wait for that; if
        other code decides only whether one more may be fetched (Celery's worker_disable_prefetch), or in which order
        queues are served (a project's own class).
        """
        qos = self._channel.qos
        one_by_one = "can_consume" in vars(qos) and "can_consume_max_estimate" not in vars(qos)
        keeps_order = type(self._channel._queue_cycle).rotate is priority_cycle.rotate
        if not self.is_buffered or one_by_one or not (self._rotates or keeps_order):
            return 1
        free = qos.can_consume_max_estimate()
        return 1 if free is None else max(1, min(free, AT_MOST))

    # -- answers -----------------------------------------------------------------------------------------------------

    def taken(self, fetch: Fetch, answer: Sequence[Any]) -> list[Taken]:
        """Decode the answer to a fetch."""
        self._channel.consumer.has_fetched(fetch.consumer)
        taken = []
        for place in range(0, len(answer), 2):
            queue = fetch.queues[answer[place] - 1]
            tag = None if queue in self.unrecorded else tag_of(fetch.consumer, f"{fetch.number}.{place // 2 + 1}")
            taken.append(Taken(queue, answer[place + 1], tag))
        return taken

    def turn_page(self, was_there_any: bool) -> None:
        """Go to the next page, in a fixed order; back to the first after a find; idle once all pages were empty."""
        self._barren_pages = 0 if was_there_any else self._barren_pages + 1
        self._page = 0 if was_there_any and not self._rotates else self._page + 1
        self.is_idle = self._barren_pages * LOOK_AT_ONCE >= len(self._channel.active_queues)
        if self.is_idle:
            self._page = self._barren_pages = 0

    def fetch_now(self, queue: str) -> list[Taken]:
        """Fetch one message of a queue and wait for the answer, without redis-py's retries, which would fetch twice."""
        pool = self._channel.pool
        for by_text in (False, True):
            self.knows_scripts = not by_text
            fetch, command = self.ask([queue], 1)
            connection = pool.get_connection()
            try:
                connection.send_command(*command)
                return self.taken(fetch, connection.read_response())
            except NoScriptError:
                continue
            except BaseException:  # at a time limit: the next command would read this answer
                connection.disconnect()
                raise
            finally:
                pool.release(connection)
        raise AssertionError("a script sent as text is known")

    @property
    def _rotates(self) -> bool:
        return type(self._channel._queue_cycle).rotate is round_robin_cycle.rotate


# -- deliveries --------------------------------------------------------------------------------------------------------


def deliver(channel: Any, taken: Sequence[Taken]) -> bool:
    """Deliver messages in their order; undeliverable messages return to their places in the lists."""
    delivered = False
    left: list[str] = []
    with channel.renewing_if_struck():
        rest = deque(_decoded(channel, taken))
    try:
        while rest:
            payload, one = rest[0]
            if one.tag is not None and one.queue not in channel.connection._callbacks:  # cancelled meanwhile
                left.append(one.tag)
            else:
                delivered |= _hand_over(channel, payload, one)
            rest.popleft()
    finally:
        left += [one.tag for _, one in rest if one.tag is not None and one.tag not in channel.qos._delivered]
        if left:
            consumer, _ = parted(left[0])
            with channel.renewing_if_struck():
                channel.records.give_back(consumer, [parted(tag)[1] for tag in left])
    return delivered


def message_of(channel: Any, taken: Iterable[Taken]) -> Any:
    """Return the first valid message of these, for `basic_get`; None if there is none."""
    for payload, one in _decoded(channel, taken):
        try:
            return channel.Message(payload, channel=channel)
        except NotAMessageError as error:
            _bury(channel, one, error)
    return None


def _hand_over(channel: Any, payload: Any, one: Taken) -> bool:
    properties = payload["properties"]
    is_suspect = SUSPECT in properties and not is_for_later(payload.get("headers") or {})
    if is_suspect and one.tag is not None:  # its worker died with it, or left
        channel.quarantine.begin(one.tag, returns(properties))
    try:
        channel.connection._deliver(payload, one.queue)
    except NotAMessageError as error:
        _bury(channel, one, error)
        return False
    return True


def _decoded(channel: Any, taken: Iterable[Taken]) -> Iterator[tuple[Any, Taken]]:
    """Decode messages; bury those that are invalid."""
    for one in taken:
        try:
            payload = made(partial(_payload_of, one))
        except NotAMessageError as error:
            _bury(channel, one, error)
        else:
            yield payload, one


def _bury(channel: Any, one: Taken, error: NotAMessageError) -> None:
    logger.error("Queue %r had %.200r: %s", one.queue, one.text, error.reason)
    if one.tag is not None:
        channel.records.bury(*parted(one.tag), error.reason)


def _payload_of(one: Taken) -> Any:
    """Return a message's text with this delivery's tag instead of its permanent tag."""
    payload = loads(one.text.decode())
    own_tag = payload["properties"]["delivery_tag"]
    payload["properties"]["delivery_tag"] = one.tag or own_tag
    return payload

"""Finds messages that wait in a Redis broker, without reading a million of them or holding up the server.

kombu keeps a queue in a list for each priority step, and pops the oldest message from its right end. A list cannot be
asked for a task id, so its oldest part is read, page by page, each a small LRANGE at the end which Redis finds without
walking. What is further left was published later, so the order tells of the rest. What a worker has fetched is in the
hash `unacked`, and `unacked_index` says since when: only what was fetched lately is read. For the rest the worker that
has it vouches to the store; what nobody vouches for is a dead worker's, which Celery gives back after an hour. What
workers of our own transport have is in a record for each, and back in its list within seconds of a worker's death.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...model.broker_view import Sight, Sought
from ...transport.topics import matches
from ..messages import doorbell
from ..messages.kept_message import Route, route_of

OF_A_LIST = 2000
OF_ALL = 10_000
"""Messages read in one look, of one list and of all."""
OF_A_LIST_BYTES = 4_000_000
FIRST_PAGE, LARGEST_PAGE = 16, 512
PAGE_BYTES = 256_000
"""The size that a page aims at, whatever the messages' size: no command is to hold up the server."""
OVERLAP = 16
"""By how many messages two pages overlap: workers pop meanwhile, and the rest moves up."""
LAST = 500
"""How many of the ids that were read last are returned of a list that was not read to its end."""
FETCHED = 10_000
FETCHED_PAGE = 64

Ask = Callable[[Callable[[Any], Sight]], Sight | None]
"""Puts a question to the broker on a channel of kombu's; None without an answer."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of one list that was read: `ids`, the next to be served first."""

    ids: Sequence[str] = ()
    known: frozenset[str] = frozenset()
    whole: bool = True
    torn: bool = False
    """It was served faster than it was read, or there was no time for it: nothing is known of the rest."""


class RedisLook:
    """One look, in which each list is read at most once. A transport with another layout has a look of its own."""

    def __init__(self, ask: Ask, *, fetched_within_s: float) -> None:
        self._ask = ask
        self._fetched_within_s = fetched_within_s
        self._parts: dict[str, _Part] = {}
        self._tables: dict[str, Sequence[tuple[str, ...]]] = {}
        self._fetched: frozenset[str] | None = None
        self._left = OF_ALL

    def find(self, sought: Sequence[Sought]) -> Sight | None:
        """Look for messages: in the lists first and then among what was fetched, for that is how they move."""
        return self._ask(lambda channel: self._find(channel, sought))

    def _find(self, channel: Any, sought: Sequence[Sought]) -> Sight:
        there: set[str] = set()
        unread: set[str] = set()
        behind: dict[str, str] = {}
        for one in sought:
            route = doorbell.route(one) if one.publication is None else route_of(one.publication)
            parts = {} if route is None else {key: self._part(channel, key) for key in self._lists(channel, route)}
            if any(one.task_id in part.known for part in parts.values()):
                there.add(one.task_id)
            elif route is None or any(part.torn for part in parts.values()):  # newer formats are for newer workers
                unread.add(one.task_id)
            else:
                behind.update((one.task_id, key) for key, part in parts.items() if not part.whole)
        if len(there) < len(sought):
            there |= self._fetched_lately(channel).intersection(one.task_id for one in sought)
        behind = {task_id: key for task_id, key in behind.items() if task_id not in there}
        return Sight(there, behind, {key: self._parts[key].ids[-LAST:] for key in set(behind.values())}, unread - there)

    # -- waiting -------------------------------------------------------------------------------------------------

    def _lists(self, channel: Any, route: Route) -> list[str]:
        """Return the lists into which kombu puts a message that goes this way.

        What its publisher has declared only counts where nothing is bound: Celery declares the default queue for a
        message that was sent to an exchange.
        """
        queues: Sequence[str] = [route.routing_key]
        if route.exchange:
            queues = self._bound(channel, route.exchange, route.routing_key) or route.queues
        message = {"properties": {"priority": route.priority}}
        return [_list_of(channel, queue, message) for queue in queues]

    def _bound(self, channel: Any, exchange: str, routing_key: str) -> Sequence[str]:
        """Return the queues that an exchange gives a message to. Only a topic has patterns: no type need be known."""
        if exchange not in self._tables:
            self._tables[exchange] = channel.get_table(exchange)
        return sorted(
            row[-1]
            for row in self._tables[exchange]
            if (matches(row[0], routing_key) if any(row[1:-1]) else row[0] == routing_key)
        )

    def _part(self, channel: Any, key: str) -> _Part:
        if key not in self._parts:
            self._parts[key] = self._read(channel, channel.global_keyprefix + key)
        return self._parts[key]

    def _read(self, channel: Any, key: str) -> _Part:  # noqa: PLR0915 - one walk, and what it counts
        """Read the oldest part of a list, from its right end."""
        ids: list[str] = []
        last: bytes | None = None
        end = read = size = 0  # how far from the right end, how many messages, how many bytes
        page = FIRST_PAGE
        whole = torn = False
        while not whole and not torn:
            if read >= min(OF_A_LIST, self._left) or size >= OF_A_LIST_BYTES:
                torn = last is None  # other lists have taken all of this look
                break
            overlap = min(OVERLAP, page, end)
            try:
                texts: list[bytes] = channel.client.lrange(key, -(end + page), overlap - end - 1)
            except channel.ResponseError:  # it is no list, so that nothing waits in it
                return _Part()
            whole = len(texts) < overlap + page
            end += len(texts) - overlap
            of_page = sum(map(len, texts))
            read += len(texts)
            size += of_page
            if last is not None:
                torn = last not in texts
                texts = [] if torn else texts[: texts.index(last)]
            if texts:
                last = texts[0]
                ids += filter(None, map(_task_id, reversed(texts)))
            if of_page > PAGE_BYTES:
                page = max(1, page // 2)
            elif 2 * of_page < PAGE_BYTES:
                page = min(2 * page, LARGEST_PAGE)
        self._left -= read
        return _Part(ids, frozenset(ids), whole and not torn, torn)

    # -- fetched -------------------------------------------------------------------------------------------------

    def _fetched_lately(self, channel: Any) -> frozenset[str]:
        if self._fetched is None:
            client, prefix = channel.client, channel.global_keyprefix
            since = time.time() - self._fetched_within_s  # kombu's scores are the workers' clocks
            tags = client.zrangebyscore(prefix + channel.unacked_index_key, since, "+inf", start=0, num=FETCHED)
            found: set[str | None] = set()
            for first in range(0, len(tags), FETCHED_PAGE):
                texts = client.hmget(prefix + channel.unacked_key, tags[first : first + FETCHED_PAGE])
                found.update(_task_id_of(json.loads(text)[0]) for text in texts if text is not None)
            if hasattr(channel, "held"):  # transport/redis/broker_channel.py
                found.update(map(_task_id, channel.held(FETCHED)))
            self._fetched = frozenset(filter(None, found))
        return self._fetched


def _list_of(channel: Any, queue: str, message: Any) -> str:
    """Return the key of the list into which a channel of kombu's puts a message: one for each step of priority."""
    key: str = channel._q_for_pri(queue, channel._get_message_priority(message))
    return key


def _task_id(text: bytes) -> str | None:
    try:
        return _task_id_of(json.loads(text))
    except ValueError:  # somebody else's
        return None


def _task_id_of(message: Any) -> str | None:
    try:
        found: str | None = message["headers"]["id"]
    except (KeyError, TypeError):
        return None
    return found

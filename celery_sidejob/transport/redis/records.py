"""The records of consumers: an acknowledgement, or the return to its list, removes a message from its record.

A delivery tag names the consumer that has the message, and the message's token in that consumer's record. The numbers
of all records are an `overview`; to `release` them is the way back to kombu's own transport.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kombu.log import get_logger
from kombu.utils.json import dumps, loads
from redis import Redis

from ...model.printable import counted
from .. import messages_recovered, tell_buried
from ..quarantine import SUSPECT, is_counted_by_a_row, is_for_later, returns
from .scripts import GIVE_BACK, Keys

logger = get_logger(__name__)

BELL_MS = 60_000
"""Milliseconds for which an unheard bell is kept; a consumer that waits later checks the queue first."""
PAGE = 200
PAGE_BYTES = 4_000_000
"""The most messages, and bytes, that one script gives back; larger records are returned in pages, the newest first."""
COMPANY = ("recover", "leave")
"""The reasons for a return after which a message becomes a suspect; a lost pool process had only one message."""
SENTENCE = "came back {} from consumers that had begun it"


@dataclass(frozen=True, slots=True)
class Move:
    """A message on its way out of a record."""

    token: str
    list_key: str
    text: bytes
    task_id: str | None
    buried: str | None = None
    """Why it goes to the dead list; None if it does not."""


class Records:
    """The records of all consumers of one broker, through one client."""

    def __init__(self, client: Any, keys: Keys, *, delivery_limit: int | None) -> None:
        self.client = client
        self.keys = keys
        self._delivery_limit = delivery_limit

    def acknowledge(self, consumer: str, token: str) -> bool:
        """Forget a finished message; False if the consumer no longer has it."""
        return bool(self.client.execute_command(*self.acknowledging(consumer, token)))

    def acknowledging(self, consumer: str, token: str) -> tuple[str, str, str]:
        """Return the command for `forget`."""
        return ("HDEL", self.keys.held(consumer), token)

    def give_back(self, consumer: str, tokens: Iterable[str]) -> int:
        """Give messages back that a consumer has not begun; returns how many of them it still had."""
        return sum(len(page) for page in self._put_back(consumer, "give_back", tokens))

    def send_back(self, consumer: str, token: str) -> bool:
        """Give a begun message back, behind messages that came back before, and count this; False if it is gone."""
        return any(len(page) for page in self._put_back(consumer, "send_back", [token], counts=lambda token: True))

    def leave(self, consumer: str, *, begun: Container[str] = ()) -> int:
        """Give back all messages of a consumer, and forget the consumer; returns their number.

        The return of messages that had `begun` is counted.
        """
        pages = self._put_back(consumer, "leave", self.tokens(consumer), counts=begun.__contains__)
        return sum(len(page) for page in pages)

    def recover(self, consumer: str, *, after_page: Callable[[], None] = lambda: None) -> int:
        """Give back all messages of a dead consumer, and announce it; stops if the consumer turns out to be alive.

        The return of messages that it may have begun is counted, also of those that it fetched after its last beat.
        """
        recovered = 0
        waiting = {token.decode() for token in self.client.smembers(self.keys.waiting(consumer))}
        tokens = self.tokens(consumer)
        for page in self._put_back(consumer, "recover", tokens, counts=lambda token: token not in waiting):
            after_page()
            recovered += len(page)
            back = defaultdict(list)
            for move in reversed(page):
                if move.buried is None:
                    back[self.keys.queue_of(move.list_key)].append(move.task_id)
            for queue, task_ids in back.items():
                messages_recovered.send(consumer=consumer, queue=queue, task_ids=task_ids)
        return recovered

    def bury(self, consumer: str, token: str, reason: str) -> None:
        """Move a message of a consumer to the dead list."""
        there = [_parted(entry) for entry in self._read(consumer, token) if entry is not None]
        self._take_back(consumer, "give_back", [Move(token, list_key, text, None, reason) for list_key, text in there])

    def tokens(self, consumer: str) -> list[str]:
        """Return the tokens of a consumer's messages."""
        return [token.decode() for token in self.client.hkeys(self.keys.held(consumer))]

    def _put_back(
        self, consumer: str, why: str, tokens: Iterable[str], *, counts: Callable[[str], bool] = lambda token: False
    ) -> Iterator[list[Move]]:
        """Give messages back, newest first; yields the returned messages of each page, including an empty last page.

        Several processes may do this at once: each skips the messages that another has given back, in the same order.
        """
        ordered = sorted(tokens, key=_age, reverse=True)
        for first in range(0, max(len(ordered), 1), PAGE):
            page = ordered[first : first + PAGE]
            texts = self._read(consumer, *page)
            there = [(token, text) for token, text in zip(page, texts, strict=True) if text is not None]
            moves = [self._move(token, text, why=why, had_begun=counts(token)) for token, text in there]
            for part in _parts(moves):
                gone = self._take_back(consumer, why, part)
                if gone is None:
                    return
                yield gone

    def _read(self, consumer: str, *tokens: str) -> list[bytes | None]:
        return self.client.hmget(self.keys.held(consumer), tokens) if tokens else []

    def _take_back(self, consumer: str, why: str, moves: Sequence[Move]) -> list[Move] | None:
        """Run the script for one page; return the messages that were given back, None if the consumer is not dead."""
        keys = self.keys
        lists = sorted({move.list_key for move in moves})
        arguments: list[Any] = [consumer, why, BELL_MS, len(lists)]
        for move in moves:
            number = 0 if move.buried is not None else lists.index(move.list_key) + 1
            arguments += [move.token, number, _obituary(keys, move) if number == 0 else move.text]
        heads = [keys.consumers, keys.recovering, keys.held(consumer), keys.dead, keys.waiting(consumer)]
        answer = GIVE_BACK.run(self.client, [*heads, *lists, *keys.bells_of(lists)], arguments)
        if answer is None:
            return None
        went = {token.decode() for token in answer}
        if len(went) < len(moves):
            self._tell_what_stays(consumer, [move for move in moves if move.token not in went])
        gone = [move for move in moves if move.token in went]
        for move in gone:
            if move.buried is not None:
                tell_buried(keys.queue_of(move.list_key), move.task_id, move.buried)
        return gone

    def _tell_what_stays(self, consumer: str, moves: Sequence[Move]) -> None:
        """Log the messages that remain although no other process gave them back: their list is no list any more."""
        there = self._read(consumer, *(move.token for move in moves))
        for list_key in sorted({move.list_key for move, text in zip(moves, there, strict=True) if text is not None}):
            logger.error("Messages of %s cannot go back to %r: that key is not a list", consumer, list_key)

    def _move(self, token: str, entry: bytes, *, why: str, had_begun: bool) -> Move:
        list_key, text = _parted(entry)
        try:
            message = loads(text.decode())
            headers, properties = message["headers"], message["properties"]
            headers["redelivered"] = properties["delivery_info"]["redelivered"] = True
            task_id = headers.get("id")
            is_counted = had_begun and not is_for_later(headers)
            if why != "recover" and is_counted_by_a_row(headers):  # its store may be unreachable
                is_counted = False
            # Not a header: Celery passes headers on to the message of a retry, which is not to blame.
            count = returns(properties) + is_counted
            if count:
                properties["delivery_count"] = count
            if is_counted and why in COMPANY:
                properties[SUSPECT] = True
        except Exception:  # the next consumer reports the fault
            return Move(token, list_key, text, None)
        limit = self._delivery_limit
        if is_counted and limit is not None and count >= limit:
            return Move(token, list_key, text, task_id, SENTENCE.format(counted(count, "time", "times")))
        return Move(token, list_key, dumps(message).encode(), task_id)


def _parts(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Divide a page if its messages are large; an empty page is a part too, because its consumer may have to leave."""
    part: list[Move] = []
    size = 0
    for move in moves:
        if part and size + len(move.text) > PAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(move)
        size += len(move.text)
    yield part


def _parted(entry: bytes) -> tuple[str, bytes]:
    """Split a record's entry into its list and the message in its stored form."""
    size, _, rest = entry.partition(b":")
    return rest[: int(size)].decode(), rest[int(size) :]


def _age(token: str) -> tuple[int, int]:
    """Order tokens by the time of their fetch."""
    fetch, _, number = token.partition(".")
    return int(fetch), int(number)


def _obituary(keys: Keys, move: Move) -> str:
    text = move.text.decode("utf-8", "surrogateescape")
    return json.dumps(
        {
            "queue": keys.queue_of(move.list_key),
            "list": move.list_key,
            "task_id": move.task_id,
            "reason": move.buried,
            "at": time.time(),
            "message": text,
        }
    )


# -- delivery tags -----------------------------------------------------------------------------------------------------


def tag_of(consumer: str, token: str) -> str:
    """Return the tag of a delivery."""
    return f"{consumer}#{token}"


def parted(delivery_tag: str) -> tuple[str, str]:
    """Split a delivery tag into its consumer and the token in the record; no consumer if the tag is not ours."""
    consumer, _, token = str(delivery_tag).rpartition("#")
    return consumer, token


def tokens_of(consumer: str, tags: Iterable[str]) -> set[str]:
    """Return the tokens of the delivery tags that belong to this consumer."""
    return {token for owner, token in map(parted, tags) if owner == consumer}


# -- for the people who run a broker -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overview:
    """The state, in numbers."""

    consumers: int
    """The number of consumers, and of those that are dead and not recovered yet."""
    held: int
    """The number of messages that they hold."""
    dead: int
    """The number of messages in the dead list."""


def overview(channel: Any) -> Overview:
    """Read the state from the broker of a channel."""
    client: Any = Redis(connection_pool=channel.pool)
    keys = Keys(channel.global_keyprefix, channel.sep)
    consumers = client.zrange(keys.consumers, 0, -1)
    with client.pipeline(transaction=False) as asked:
        for name in consumers:
            asked.hlen(keys.held(name.decode()))
        asked.llen(keys.dead)
        *held, dead = asked.execute()
    return Overview(len(consumers), sum(held), dead)


@dataclass(frozen=True, slots=True)
class Released:
    """The numbers of messages that were given back, and of those that were not."""

    consumers: int
    messages: int
    alive: tuple[str, ...]
    """The live consumers, which keep their messages."""
    dead: int
    """The number of messages in the dead list, which stay there."""


def release(channel: Any, *, force: bool = False) -> Released:
    """Give back the messages of dead consumers; with `force` also of live ones, whose acknowledgements then fail.

    The channel may be kombu's own: only the server, the database and the key prefix matter.
    """
    client: Any = Redis(connection_pool=channel.pool)
    keys = Keys(channel.global_keyprefix, channel.sep)
    records = Records(client, keys, delivery_limit=None)
    seconds, microseconds = client.time()
    now_ms = seconds * 1000 + microseconds // 1000
    consumers = messages = 0
    alive: list[str] = []
    for name, until_ms in client.zrange(keys.consumers, 0, -1, withscores=True):
        consumer = name.decode()
        if until_ms > now_ms and not force:
            alive.append(consumer)
            continue
        consumers += 1
        messages += records.leave(consumer)
    return Released(consumers, messages, tuple(alive), client.llen(keys.dead))

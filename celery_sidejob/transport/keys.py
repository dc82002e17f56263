"""Every key that the transport has in Redis beside kombu's own, and nobody else's name for one.

All begin with the app's `global_keyprefix`: redis-py sends them as they are here, since the clients with which kombu
puts prefixes do so for the first key of a script alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one broker."""

    prefix: str
    separator: str
    """Between a queue and a priority in the name of a list (kombu's `sep`)."""

    @property
    def consumers(self) -> str:
        """A sorted set: who fetches, and until when it counts as alive (Redis' clock, in milliseconds)."""
        return f"{self.prefix}_sidejob.consumers"

    @property
    def recovering(self) -> str:
        """A sorted set: whose messages are being recovered, and until when nobody else need try."""
        return f"{self.prefix}_sidejob.recovering"

    @property
    def dead(self) -> str:
        """A list of JSON: messages that nobody is to be given again."""
        return f"{self.prefix}_sidejob.dead"

    def held(self, consumer: str) -> str:
        """A hash: each message that a consumer has, by its token, with the list that it is from."""
        return f"{self.prefix}_sidejob.held.{consumer}"

    def waiting(self, consumer: str) -> str:
        """A set: the tokens of what a consumer has and has not begun, as of its last beat."""
        return f"{self.prefix}_sidejob.waiting.{consumer}"

    def bell(self, queue: str) -> str:
        """A list with at most one empty element: something has come into the queue that nobody may have seen."""
        return f"{self.prefix}_sidejob.bell.{queue}"

    def bells(self, queues: Iterable[str]) -> list[str]:
        """Those of several queues."""
        return [self.bell(queue) for queue in queues]

    def kombu_list(self, name: str) -> str:
        """The list which kombu calls so."""
        return self.prefix + name

    def queue_of(self, list_key: str) -> str:
        """The queue that a list is a part of."""
        return list_key[len(self.prefix) :].rsplit(self.separator, 1)[0]

    def bells_of(self, list_keys: Sequence[str]) -> list[str]:
        """The bell of each list's queue."""
        return [self.bell(self.queue_of(key)) for key in list_keys]

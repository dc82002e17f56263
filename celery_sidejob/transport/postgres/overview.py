"""The state of this transport in a broker, for the people who run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...store.broker import dead, queues
from .link import Link


@dataclass(frozen=True, slots=True)
class Overview:
    """How many consumers, queues and messages a broker has."""

    consumers: int
    """Consumers, with those that are dead and not found out yet."""
    queues: Sequence[Any]
    """The lasting queues: name, ready, held, later."""
    dead: int
    """Messages in the dead list."""

    @property
    def held(self) -> int:
        """Messages that consumers hold."""
        return sum(queue.held for queue in self.queues)


def overview_of(link: Link) -> Overview:
    """Read the state from a broker."""
    return Overview(
        link.run("read", queues.count_consumers), link.run("read", queues.counts), link.run("read", dead.count)
    )

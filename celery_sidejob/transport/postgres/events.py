"""Events of this process that wait for the next beat of one of its hearts, which sends all of them in its statement.

A worker tells of itself every two seconds. If each event were a statement of its own, fifty idle workers would need as
many for that as for their beats. A process without a heart sends each event at once.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from ...model import native
from ...store.broker.queues import Broadcast
from .link import Link

MOST = 10_000
"""How many events wait at most; further ones are sent at once."""

_Key = tuple[str, str, int]
_lock = native.lock()
_hearts: defaultdict[_Key, set[object]] = defaultdict(set)
"""The hearts that beat, by database, schema and process: a forked process has none."""
_waiting: dict[_Key, deque[Broadcast]] = {}


def begin(link: Link, heart: object) -> None:
    """Note that a heart sends the events of this link's schema from now on."""
    with _lock:
        _hearts[_key(link)].add(heart)


def end(link: Link, heart: object) -> None:
    """Note that the heart has ended, or is about to."""
    with _lock:
        _hearts[_key(link)].discard(heart)


def keep(link: Link, event: Broadcast) -> bool:
    """Have an event sent by the next beat; False if it must be sent at once."""
    key = _key(link)
    with _lock:
        if not _hearts[key]:
            return False
        waiting = _waiting.setdefault(key, deque())
        if len(waiting) >= MOST:
            return False
        waiting.append(event)
    return True


def take(link: Link) -> Sequence[Broadcast]:
    """Take what waits, to be sent now."""
    with _lock:
        return tuple(_waiting.pop(_key(link), ()))


def put_back(link: Link, events: Iterable[Broadcast]) -> None:
    """Have events that were taken, and not sent, wait before those that came since."""
    with _lock:
        _waiting.setdefault(_key(link), deque()).extendleft(reversed(tuple(events)))


def left(link: Link) -> Sequence[Broadcast]:
    """Take what waits if no heart is left that could send it."""
    return () if _hearts[_key(link)] else take(link)


def _key(link: Link) -> _Key:
    return link.url, link.schema, os.getpid()

"""Replaces `can_consume`, `can_consume_max_estimate`, `ack` and `reject` of the QoS of one channel.

Read in kombu 5.5.2 and 5.7.0. The channel asks the first two before it fetches, kombu's own on Redis and those of our
transports (`transport/*/acknowledgements.py`); the last two are called when a message is over. Ours fetches as many
messages as a worker has room for, and notifies a worker with gevent when there is room again. If a later kombu does not
ask before it fetches, a worker keeps messages that it cannot begin, until they have waited for a second and are given
back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wrapping import wrap


def limit(qos: Any, *, may: Callable[[], bool], room: Callable[[], int]) -> None:
    """Fetch only as many messages as there is room for, and only while `may` returns True."""

    def can_consume(before: Callable[[], bool]) -> bool:
        allowed = may()
        return bool(before() and allowed)

    def can_consume_max_estimate(before: Callable[[], int | None]) -> int:
        free = before()
        return room() if free is None else min(free, room())

    wrap(qos, "can_consume", can_consume)
    wrap(qos, "can_consume_max_estimate", can_consume_max_estimate)


def tell_of_ends(qos: Any, tell: Callable[[], None]) -> None:
    """Call `tell` after each message that was acknowledged or rejected."""

    def end(before: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return before(*args, **options)
        finally:
            tell()

    wrap(qos, "ack", end)
    wrap(qos, "reject", end)

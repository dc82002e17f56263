"""A message whose worker died with it, or left, is delivered alone: the next death is charged to that message only.

Only a message that had begun can have killed its process. A kombu consumer begins a message when it receives it. A
Celery worker may keep it for long, until a process of its pool is free; Celery's list of requests shows this. The list
is found in `sys.modules`, because this transport does not import Celery.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from math import inf
from time import monotonic
from typing import Any

STATE = "celery.worker.state"
SUSPECT = "delivery_suspect"
"""The property of a message that was in progress in a worker that died or left; the fetch script looks for it."""
ROWS = frozenset({"sidejob", "sidejob_durable"})
"""Headers of messages whose rows in a store count their losses; the return of such a message is not counted."""


class Quarantine:
    """The quarantine of one channel: while a message is in it, the channel fetches nothing."""

    def __init__(self, *, limit: int | None, silence_s: float) -> None:
        """`limit`: how often a message may come back. `silence_s`: after so many seconds a consumer counts as dead."""
        self.limit: float = inf if limit is None else limit
        self._silence_s = silence_s
        self._alone: tuple[Any, float] | None = None

    @property
    def until(self) -> float | None:
        """When the quarantine ends, if the message does not end before; None without one."""
        return None if self._alone is None else self._alone[1]

    def begin(self, delivery_tag: Any, returns: int) -> None:
        """Fetch nothing beside this message, until a heart has noted which messages have begun.

        From half of the limit on it lasts until the message is done: messages that run long beside it may be just as
        much to blame.
        """
        is_grave = 2 * returns >= self.limit
        self._alone = delivery_tag, inf if is_grave else monotonic() + self._silence_s

    def is_on(self, qos: Any) -> bool:
        """Tell whether a message is in quarantine, so that nothing may be fetched now."""
        if self._alone is None:
            return False
        delivery_tag, until = self._alone
        if holds(qos, delivery_tag) and monotonic() < until:
            return True
        self._alone = None
        return False


def holds(qos: Any, delivery_tag: Any) -> bool:
    """Tell whether a message was delivered, and is neither acknowledged nor given back."""
    return delivery_tag in qos._delivered and delivery_tag not in qos._dirty


# -- what has begun ----------------------------------------------------------------------------------------------------


def waiting_tags() -> set[str]:
    """Return the delivery tags of messages that a worker in this process has received and not begun."""
    state = sys.modules.get(STATE)
    return set() if state is None else _tags(_all(state.reserved_requests) - _all(state.active_requests))


def running_tags() -> set[str]:
    """Return the delivery tags of messages that a worker in this process has begun and not ended."""
    state = sys.modules.get(STATE)
    return set() if state is None else _tags(_all(state.active_requests))


def returns(properties: Mapping[str, Any]) -> int:
    """Return how often a message has come back from a consumer that had begun it."""
    try:
        return int(properties.get("delivery_count") or 0)
    except (TypeError, ValueError, OverflowError):  # written by another program
        return 0


def is_for_later(headers: Mapping[str, Any]) -> bool:
    """Tell whether a message has an eta in the future: then its worker only keeps it."""
    eta = eta_of(headers)
    return eta is not None and eta.replace(tzinfo=eta.tzinfo or UTC) > datetime.now(UTC)


def eta_of(headers: Mapping[str, Any]) -> datetime | None:
    """Return the eta of a task's message, which may be naive; None if it has none that can be read."""
    try:
        return datetime.fromisoformat(headers["eta"])
    except (KeyError, TypeError, ValueError):
        return None


def is_counted_by_a_row(headers: Mapping[str, Any]) -> bool:
    """Tell whether a row in a store counts how often the runs of this message were lost."""
    return not ROWS.isdisjoint(headers)


def _all(requests: Any) -> set[Any]:
    """Return the members of a weak set to which another thread may be adding: `list` copies its data in one step."""
    return {request for reference in list(requests.data) if (request := reference()) is not None}


def _tags(requests: set[Any]) -> set[str]:
    return {str(request.message.delivery_tag) for request in requests if getattr(request, "message", None) is not None}
